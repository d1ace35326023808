"""A real vLLM server behind the engine service, shared by the tests; the last of them kills it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
import pytest_asyncio

from infra.processes import ServiceProcess
from infra.rpc import RpcClient, RpcError
from tasks.rollout.config import VllmEngineConfig
from tasks.rollout.engines.base import EngineStats, Generation
from tasks.rollout.engines.client import RemoteEngine
from tasks.rollout.engines.vllm.engine import VllmEngine
from tasks.trajectory import StopReason
from tests.rollout.engines.vllm.policies import (
    END,
    FOREIGN,
    INCOMPLETE,
    MAX_CONTEXT,
    NEW,
    OLD,
    TORN,
    UNPUBLISHED,
    VOCABULARY,
    chosen,
    logprobs,
    needs_vllm,
    prompt,
    request,
    settings,
    write,
)

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]
# Both sides compute in float32 and differ in the order of their sums only: some 1e-5 is seen.
TOLERANCE = 2e-4
# A turn of so many tokens takes seconds: it never ends before what a test does to it.
LONG = 3900


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vllm")
    write(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(folder: Path) -> AsyncIterator[ServiceProcess]:
    process = await ServiceProcess.start(
        "engine", "tasks.rollout.engines.service", settings(folder), folder / "engine.log", start_limit_s=600
    )
    yield process
    await process.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(service: ServiceProcess) -> AsyncIterator[RemoteEngine]:
    client = await RpcClient(service.url, token="a secret of the test").connect()
    yield RemoteEngine(client)
    await client.close()


async def serve(engine: RemoteEngine, version: int) -> None:
    if (await engine.stats()).version != version:
        await engine.suspend()
        await engine.load_weights(version)
        await engine.resume()


async def until(engine: RemoteEngine, holds: Callable[[EngineStats], bool]) -> EngineStats:
    async with asyncio.timeout(120):
        while True:
            stats = await engine.stats()
            if holds(stats):
                return stats
            await asyncio.sleep(0.02)


async def begun(engine: RemoteEngine, tokens: int) -> EngineStats:
    """Wait until so many tokens more are sampled."""
    before = (await engine.stats()).decode_tokens
    return await until(engine, lambda stats: stats.decode_tokens >= before + tokens)


async def stands_still(engine: RemoteEngine) -> bool:
    before = (await engine.stats()).decode_tokens
    await asyncio.sleep(0.3)
    return (await engine.stats()).decode_tokens == before


def versions(generation: Generation) -> set[int]:
    return set(generation.versions.tolist())


async def test_a_running_turn_is_reported_as_it_is_answered(
    service: ServiceProcess, engine: RemoteEngine
) -> None:
    await serve(engine, OLD)
    reported: list[dict[str, Any]] = []
    changed = asyncio.Event()

    def on_notice(name: str, payload: dict[str, Any]) -> None:
        if name == "sampled":
            reported.append(payload)
            changed.set()

    client = await RpcClient(service.url, token="a secret of the test").connect(on_notice=on_notice)
    asker = RemoteEngine(client)
    running = asyncio.create_task(asker.generate(request("told", prompt(1, 20), LONG, temperature=0.0)))
    async with asyncio.timeout(60):
        while len(reported) < 2:
            await changed.wait()
            changed.clear()
    await engine.abort(["told"], StopReason.CANCELLED)
    answer = await running
    for field, kind, whole in (
        ("tokens", "<i4", answer.tokens),
        ("logprobs", "<f4", answer.logprobs),
        ("versions", "<i4", answer.versions),
    ):
        found = np.concatenate([np.frombuffer(payload[field], kind) for payload in reported])
        assert 0 < len(found) <= len(whole)
        assert found.tolist() == whole[: len(found)].tolist()
    starts = np.cumsum([0, *(len(payload["tokens"]) // 4 for payload in reported)])
    assert [payload["start"] for payload in reported] == starts[:-1].tolist()
    client.drop()
    await client.close()


async def test_logprobs_are_those_of_the_distribution_sampled_from(engine: RemoteEngine) -> None:
    await serve(engine, OLD)
    contexts = [prompt(i, length) for i, length in enumerate([1, 5, 130, 300, 700])]
    for temperature in (1.0, 0.6, 0.0):
        found = await asyncio.gather(
            *(
                engine.generate(request(f"s{i}", context, 24, temperature, seed=i))
                for i, context in enumerate(contexts)
            )
        )
        for context, answer in zip(contexts, found, strict=True):
            sampled = answer.tokens.tolist()
            table = logprobs(0, context, sampled, temperature or 1.0)
            np.testing.assert_allclose(answer.logprobs, chosen(table, sampled), atol=TOLERANCE)
            assert versions(answer) == {OLD}
            assert len(sampled) == 24 or sampled[-1] == END
            if temperature == 0:
                np.testing.assert_allclose(answer.logprobs, table.max(-1), atol=TOLERANCE)


async def test_draws_depend_on_the_seed_and_not_on_the_batch(engine: RemoteEngine) -> None:
    """The batch's prompts together exceed a step's tokens, where vLLM on CPUs must not prefill in chunks."""
    await serve(engine, OLD)
    alone = await engine.generate(request("a", prompt(1, 400), 16, seed=7))
    batch = await asyncio.gather(
        *(engine.generate(request(f"b{i}", prompt(1 + i, 400), 16, seed=7 + i)) for i in range(6))
    )
    assert batch[0].tokens.tolist() == alone.tokens.tolist()
    other = await engine.generate(request("a", prompt(1, 400), 16, seed=8))
    assert other.tokens.tolist() != alone.tokens.tolist()


async def test_the_end_token_ends_a_turn_and_is_kept(engine: RemoteEngine) -> None:
    """At a high temperature the end token comes about once in 400 tokens."""
    await serve(engine, OLD)
    found = await asyncio.gather(
        *(engine.generate(request(f"s{i}", prompt(i, 4), 1000, 2.0, seed=i)) for i in range(4))
    )
    ended = [answer for answer in found if answer.stop is StopReason.STOP]
    assert ended
    for answer in ended:
        assert answer.tokens[-1] == END
        assert END not in answer.tokens[:-1]
    for answer in found:
        assert len(answer.tokens) == len(answer.logprobs) == len(answer.versions)


async def test_a_turn_ends_with_its_budget_or_with_the_context(engine: RemoteEngine) -> None:
    await serve(engine, OLD)
    short = await engine.generate(request("s", prompt(0, 4), 1, 0.0))
    assert (len(short.tokens), short.stop) == (1, StopReason.LENGTH)
    cut = await engine.generate(request("s", prompt(0, MAX_CONTEXT - 3), 50, 0.0))
    assert (len(cut.tokens), cut.stop) == (3, StopReason.LENGTH)


async def test_what_cannot_be_generated_is_refused_by_code(engine: RemoteEngine) -> None:
    async def code(session: str, tokens: list[int], count: int = 4, temperature: float = 1.0) -> str:
        with pytest.raises(RpcError) as raised:
            await engine.generate(request(session, tokens, count, temperature))
        return raised.value.code

    assert await code("s", prompt(0, MAX_CONTEXT)) == "context_overflow"
    assert await code("s", [VOCABULARY]) == "invalid_request"
    assert await code("s", [-1]) == "invalid_request"
    assert await code("s", []) == "invalid_request"
    assert await code("s", [5], count=0) == "invalid_request"
    assert await code("s", [5], temperature=-1.0) == "invalid_request"
    running = asyncio.create_task(engine.generate(request("busy", [5], LONG, 0.0)))
    await until(engine, lambda stats: stats.running == 1)
    assert await code("busy", [5]) == "session_busy"
    await engine.abort(["busy"], StopReason.CANCELLED)
    assert (await running).stop is StopReason.CANCELLED


async def test_suspended_no_token_is_sampled_and_nothing_is_lost(engine: RemoteEngine) -> None:
    await serve(engine, OLD)
    held = asyncio.create_task(engine.generate(request("s", prompt(3, 20), LONG, 0.0)))
    await begun(engine, 20)
    await engine.suspend()
    assert await stands_still(engine)
    late = asyncio.create_task(engine.generate(request("late", prompt(4, 20), 4, 0.0)))
    stats = await until(engine, lambda stats: stats.running + stats.waiting == 2)
    assert stats.suspended
    assert not held.done()
    await engine.resume()
    assert len((await late).tokens) == 4
    await begun(engine, 20)
    await engine.abort(["s"], StopReason.CANCELLED)
    answer = await held
    sampled = answer.tokens.tolist()
    assert len(sampled) >= 40
    table = logprobs(0, prompt(3, 20), sampled)
    np.testing.assert_allclose(answer.logprobs, table.max(-1), atol=TOLERANCE)
    np.testing.assert_allclose(answer.logprobs, chosen(table, sampled), atol=TOLERANCE)


async def test_an_update_in_mid_turn_stamps_every_token_with_what_sampled_it(engine: RemoteEngine) -> None:
    """Each side of the seam must be what its own weights find most probable, and have their log-probability.

    After the seam that holds only if the context's KV was computed again under the new weights.
    """
    await serve(engine, OLD)
    contexts = [prompt(5, 150), prompt(6, 9)]
    held = [
        asyncio.create_task(engine.generate(request(f"s{i}", context, LONG, 0.0)))
        for i, context in enumerate(contexts)
    ]
    await begun(engine, 60)
    await engine.suspend()
    frozen = await engine.stats()
    await engine.load_weights(NEW)
    assert await stands_still(engine)
    await engine.resume()
    recomputed = await engine.recompute()
    assert (await engine.stats()).decode_tokens >= frozen.decode_tokens + len(held)
    await begun(engine, 60)
    await engine.abort(["s0", "s1"], StopReason.CANCELLED)
    for context, answer in zip(contexts, await asyncio.gather(*held), strict=True):
        sampled = answer.tokens.tolist()
        seam = int((answer.versions == OLD).sum())
        assert answer.versions.tolist() == [OLD] * seam + [NEW] * (len(sampled) - seam)
        assert 0 < seam < len(sampled)
        recomputed -= len(context) + seam - 1
        old, new = logprobs(0, context, sampled), logprobs(1, context, sampled)
        np.testing.assert_allclose(answer.logprobs[:seam], old.max(-1)[:seam], atol=TOLERANCE)
        np.testing.assert_allclose(answer.logprobs[seam:], new.max(-1)[seam:], atol=TOLERANCE)
        np.testing.assert_allclose(answer.logprobs[:seam], chosen(old, sampled)[:seam], atol=TOLERANCE)
        np.testing.assert_allclose(answer.logprobs[seam:], chosen(new, sampled)[seam:], atol=TOLERANCE)
    assert recomputed == 0


async def test_kv_of_old_weights_is_not_reused_after_an_update(engine: RemoteEngine) -> None:
    await serve(engine, OLD)
    context = prompt(8, 300)
    await engine.generate(request("s", context, 2, 0.0))
    before = (await engine.stats()).cached_tokens
    await engine.generate(request("s", context, 2, 0.0))
    cached = (await engine.stats()).cached_tokens
    assert cached - before == 256  # two whole blocks of 128
    await serve(engine, NEW)
    answer = await engine.generate(request("s", context, 8, 0.0))
    assert (await engine.stats()).cached_tokens == cached
    sampled = answer.tokens.tolist()
    expected = chosen(logprobs(1, context, sampled), sampled)
    np.testing.assert_allclose(answer.logprobs, expected, atol=TOLERANCE)


async def test_weights_that_do_not_fit_leave_the_old_ones(engine: RemoteEngine) -> None:
    await serve(engine, OLD)
    before = await engine.generate(request("s", prompt(2, 12), 16, 0.0))
    with pytest.raises(RpcError, match="not_suspended"):
        await engine.load_weights(NEW)
    await engine.suspend()
    faults = {
        FOREIGN: r"model.norm.weight is \[64\], not \[128\]",
        TORN: "CorruptWeights.*another checksum",
        INCOMPLETE: "missing: model.norm.weight",
        UNPUBLISHED: "is not published",
    }
    for version, message in faults.items():
        with pytest.raises(RpcError, match=message) as raised:
            await engine.load_weights(version)
        assert raised.value.code == "weights_rejected"
    await engine.resume()
    after = await engine.generate(request("s", prompt(2, 12), 16, 0.0))
    assert (after.tokens.tolist(), versions(after)) == (before.tokens.tolist(), {OLD})
    np.testing.assert_allclose(after.logprobs, before.logprobs, atol=TOLERANCE)


async def test_aborted_turns_return_what_they_have(engine: RemoteEngine) -> None:
    await serve(engine, OLD)
    names = ["stale", "ended", "cancelled"]
    turns = {
        name: asyncio.create_task(engine.generate(request(name, prompt(9, 8), LONG, 0.0))) for name in names
    }
    await begun(engine, 60)
    await engine.abort(["stale", "unknown"], StopReason.STALE)
    await engine.suspend()
    await engine.end_session("ended")
    stale, ended = await turns["stale"], await turns["ended"]
    assert (stale.stop, ended.stop) == (StopReason.STALE, StopReason.CANCELLED)
    for answer in (stale, ended):
        sampled = answer.tokens.tolist()
        assert 0 < len(sampled) < LONG
        expected = chosen(logprobs(0, prompt(9, 8), sampled), sampled)
        np.testing.assert_allclose(answer.logprobs, expected, atol=TOLERANCE)
        assert versions(answer) == {OLD}
    await engine.resume()
    await begun(engine, 1)
    turns["cancelled"].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await turns["cancelled"]
    async with asyncio.timeout(60):
        while True:
            if await stands_still(engine):
                break


async def test_stats_count_what_was_computed(engine: RemoteEngine) -> None:
    await serve(engine, OLD)
    before = await engine.stats()
    await asyncio.gather(*(engine.generate(request(f"t{i}", prompt(20 + i, 50), 10, 0.0)) for i in range(3)))
    after = await engine.stats()
    assert after.prefill_tokens - before.prefill_tokens == 150
    assert after.decode_tokens - before.decode_tokens == 30
    assert 10 <= after.steps - before.steps <= 30
    assert after.busy_seconds > before.busy_seconds
    assert (after.running, after.waiting, after.suspended) == (0, 0, False)
    assert after.sessions == before.sessions + 3
    await engine.end_session("t0")
    assert (await engine.stats()).sessions == before.sessions + 2


async def test_the_server_is_on_loopback_and_refuses_whoever_lacks_its_token(
    service: ServiceProcess, engine: RemoteEngine
) -> None:
    await engine.stats()
    family = psutil.Process(service.process.pid).children(recursive=True)
    assert {ip for process in family for ip, _ in listening(process)} <= {"127.0.0.1", "::1"}
    [(_, port)] = listening(server_among(family))
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        for header in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer of another token"}):
            for method, path in [
                ("POST", "/pause?mode=abort"),
                ("POST", "/collective_rpc"),
                ("POST", "/abort_requests"),
                ("POST", "/update_weight_version"),
                ("POST", "/reset_prefix_cache"),
                ("POST", "/inference/v1/generate"),
                ("POST", "/v1/completions"),
                ("GET", "/tutti/progress"),
                ("GET", "/metrics"),
                ("OPTIONS", "/pause"),
                ("GET", "/no_such_route"),
            ]:
                async with session.request(method, path, headers=header, json={}) as response:
                    assert response.status == 401
    assert not (await engine.stats()).suspended
    assert len((await engine.generate(request("s", [5, 6], 2))).tokens) == 2


async def test_tensor_parallel_computes_the_same_and_dies_whole(engine: RemoteEngine, folder: Path) -> None:
    """It begins with a published version. Its API server is killed, which vLLM's own processes outlive."""
    await serve(engine, NEW)
    config = VllmEngineConfig(**settings(folder, tensor_parallel=2)["engine"])
    split = VllmEngine(
        settings=config,
        model=folder / "model",
        max_context=MAX_CONTEXT,
        vocabulary=VOCABULARY,
        stop_tokens=[END],
        weights_url=str(folder / "weights"),
        weights_options={},
        version=NEW,
    )
    async with split:
        for context in (prompt(1, 3), prompt(2, 200)):
            whole = await engine.generate(request("s", context, 24, 0.0))
            halves = await split.generate(request("s", context, 24, 0.0))
            assert halves.tokens.tolist() == whole.tokens.tolist()
            np.testing.assert_allclose(halves.logprobs, whole.logprobs, atol=TOLERANCE)
            assert versions(halves) == {NEW}
        await split.suspend()
        with pytest.raises(RpcError, match=r"missing: model\.norm\.weight"):
            await split.load_weights(INCOMPLETE)
        await split.load_weights(OLD)
        await split.resume()
        answer = await split.generate(request("s", prompt(2, 200), 8, 0.0))
        sampled = answer.tokens.tolist()
        expected = chosen(logprobs(0, prompt(2, 200), sampled), sampled)
        np.testing.assert_allclose(answer.logprobs, expected, atol=TOLERANCE)
        server = server_among(psutil.Process().children())
        family = [server, *server.children(recursive=True)]
        assert len(family) >= 4  # API server, engine core, two workers
        turn = asyncio.create_task(split.generate(request("s", [5], LONG, 0.0)))
        await asyncio.sleep(0.1)
        server.kill()
        with pytest.raises(RpcError, match="engine_failed"):
            await turn
        with pytest.raises(RpcError, match="the vLLM server ended"):
            await split.wait_failed()
        assert await gone(family)
        with pytest.raises(RpcError, match="engine_failed"):
            await split.generate(request("s", [5], 2))


async def test_killing_the_service_leaves_no_process(service: ServiceProcess, engine: RemoteEngine) -> None:
    """The last of the file: it ends the server that the other tests share."""
    await engine.stats()
    family = psutil.Process(service.process.pid).children(recursive=True)
    assert len(family) >= 3
    service.process.kill()
    assert await gone(family)


def server_among(processes: list[psutil.Process]) -> psutil.Process:
    """vLLM's API server, which leads the others."""
    return next(each for each in processes if "tasks.rollout.engines.vllm.server" in each.cmdline())


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    return [
        (connection.laddr.ip, connection.laddr.port)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


async def gone(processes: list[psutil.Process]) -> bool:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 30)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
