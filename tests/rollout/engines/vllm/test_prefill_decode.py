"""Two real vLLM servers behind engine services: one prefills, the other decodes with its KV."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from infra.processes import ServiceProcess
from infra.rpc import RpcClient, RpcError
from tasks.rollout.engines.base import EngineStats, GenerateRequest, KvSource
from tasks.rollout.engines.client import RemoteEngine
from tasks.rollout.engines.vllm.kv_folders import PREFIX
from tests.rollout.engines.vllm.policies import (
    NEW,
    OLD,
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
TOKEN = "a secret of the test"
MEMORY = Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
TOLERANCE = 2e-4
BLOCK = 128  # tokens of a cache block of a CPU build; only whole ones are handed over
POLICY = {OLD: 0, NEW: 1}


def roots_of(service: ServiceProcess) -> list[Path]:
    """Where an engine's files of KV are."""
    return list(MEMORY.glob(f"{PREFIX}{service.process.pid}-*"))


@dataclass(frozen=True, slots=True)
class Pair:
    prefiller: RemoteEngine
    decoder: RemoteEngine
    url: str
    services: tuple[ServiceProcess, ...]

    def files(self) -> list[Path]:
        """Of KV, that the two have now."""
        roots = [root for service in self.services for root in roots_of(service)]
        assert len(roots) == len(self.services)
        return [file for root in roots for file in root.rglob("*.safetensors")]

    async def serve(self, version: int) -> None:
        for engine in (self.prefiller, self.decoder):
            if (await engine.stats()).version != version:
                await engine.suspend()
                await engine.load_weights(version)
                await engine.resume()

    def source(self, key: str) -> KvSource:
        return KvSource(self.url, TOKEN, key)

    async def stats(self) -> tuple[EngineStats, EngineStats]:
        return await self.prefiller.stats(), await self.decoder.stats()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("vllm-prefill-decode")
    write(folder)
    started = await asyncio.gather(
        *(
            ServiceProcess.start(
                role,
                "tasks.rollout.engines.service",
                {**settings(folder), "role": role, "version": OLD},
                folder / f"{role}.log",
                start_limit_s=600,
            )
            for role in ("prefill", "decode")
        ),
        return_exceptions=True,
    )
    services = [each for each in started if isinstance(each, ServiceProcess)]
    clients: list[RpcClient] = []
    try:
        for each in started:
            if isinstance(each, BaseException):
                raise each
            clients.append(await RpcClient(each.url, token=TOKEN).connect())
        yield Pair(RemoteEngine(clients[0]), RemoteEngine(clients[1]), services[0].url, tuple(services))
    finally:
        for client in clients:
            await client.close()
        for service in services:
            await service.stop()
            assert not roots_of(service)


async def when(engine: RemoteEngine, **at_least: int) -> None:
    """Wait until the engine's statistics have reached these values."""
    async with asyncio.timeout(120):
        while True:
            stats = await engine.stats()
            if all(getattr(stats, name) >= value for name, value in at_least.items()):
                return
            await asyncio.sleep(0.02)


async def turn(pair: Pair, version: int, each: GenerateRequest, held: int) -> None:
    """A greedy turn through both, checked against the policy; `held` tokens of KV are handed over."""
    before = await pair.stats()
    kv = await pair.prefiller.prefill(each.session, each.tokens)
    assert (kv.tokens, kv.version) == (len(each.tokens) // BLOCK * BLOCK, version)
    answer = await pair.decoder.generate(replace(each, kv=pair.source(kv.key)))
    after = await pair.stats()
    assert after[1].kv_imported_tokens - before[1].kv_imported_tokens == held
    assert after[1].prefill_tokens - before[1].prefill_tokens == len(each.tokens) - held
    assert after[0].decode_tokens == before[0].decode_tokens == 0
    check(each, answer.tokens.tolist(), answer.logprobs, POLICY[version])
    assert set(answer.versions.tolist()) == {version}


def check(each: GenerateRequest, tokens: list[int], found: np.ndarray, seed: int) -> None:
    table = logprobs(seed, each.tokens.tolist(), tokens)
    assert len(tokens) == each.max_new_tokens
    np.testing.assert_allclose(found, chosen(table, tokens), atol=TOLERANCE)
    if each.temperature == 0:
        assert (table.max(-1) - chosen(table, tokens) < TOLERANCE).all()


async def test_turns_are_decoded_with_the_kv_of_another_server(pair: Pair) -> None:
    await pair.serve(OLD)
    await turn(pair, OLD, request("a", prompt(1, 3 * BLOCK + 40), 12, temperature=0.0), 3 * BLOCK)
    # The last token is computed where it is decoded, and with it its block.
    await turn(pair, OLD, request("b", prompt(2, 2 * BLOCK), 12, temperature=0.0), BLOCK)
    await turn(pair, OLD, request("c", prompt(3, BLOCK - 1), 12, temperature=0.0), 0)
    await turn(pair, OLD, request("d", prompt(4, 900), 12, seed=7), 7 * BLOCK)


async def test_several_at_once(pair: Pair) -> None:
    await pair.serve(OLD)
    each = [request(f"m{i}", prompt(10 + i, 300 + 50 * i), 10, temperature=0.0) for i in range(6)]
    held = await asyncio.gather(*(pair.prefiller.prefill(one.session, one.tokens) for one in each))
    before = (await pair.decoder.stats()).kv_imported_tokens
    answers = await asyncio.gather(
        *(
            pair.decoder.generate(replace(one, kv=pair.source(kv.key)))
            for one, kv in zip(each, held, strict=True)
        )
    )
    for one, answer in zip(each, answers, strict=True):
        check(one, answer.tokens.tolist(), answer.logprobs, POLICY[OLD])
    imported = (await pair.decoder.stats()).kv_imported_tokens - before
    assert imported == sum(kv.tokens for kv in held)


async def test_an_update_makes_handed_over_kv_void(pair: Pair) -> None:
    await pair.serve(OLD)
    each = request("u", prompt(20, 500), 10, temperature=0.0)
    old = await pair.prefiller.prefill("u", each.tokens)
    running = asyncio.create_task(
        pair.decoder.generate(replace(each, session="running", max_new_tokens=2000, kv=pair.source(old.key)))
    )
    before = (await pair.decoder.stats()).decode_tokens
    await when(pair.decoder, decode_tokens=before + 50)
    await pair.decoder.suspend()
    waiting = asyncio.create_task(
        pair.decoder.generate(replace(each, session="waiting", kv=pair.source(old.key)))
    )
    await when(pair.decoder, waiting=1)
    imported = (await pair.decoder.stats()).kv_imported_tokens
    await pair.decoder.load_weights(NEW)
    await pair.decoder.resume()
    for found in (await waiting, await pair.decoder.generate(replace(each, kv=pair.source(old.key)))):
        check(each, found.tokens.tolist(), found.logprobs, POLICY[NEW])
    mixed = await running
    versions = mixed.versions
    assert sorted(set(versions.tolist())) == [OLD, NEW]
    for version in (OLD, NEW):
        table = logprobs(POLICY[version], each.tokens.tolist(), mixed.tokens.tolist())
        ours = versions == version
        np.testing.assert_allclose(
            mixed.logprobs[ours], chosen(table, mixed.tokens.tolist())[ours], atol=TOLERANCE
        )
    assert (await pair.decoder.stats()).kv_imported_tokens == imported
    await pair.serve(NEW)
    with pytest.raises(RpcError, match="kv_gone"):
        await pair.prefiller.export_kv(old.key, 0, 100)
    await turn(pair, NEW, request("v", prompt(21, 500), 10, temperature=0.0), 3 * BLOCK)


async def test_kv_that_cannot_be_had_is_computed(pair: Pair) -> None:
    await pair.serve(NEW)
    each = request("g", prompt(30, 400), 10, temperature=0.0)
    held = await pair.prefiller.prefill("g", each.tokens)
    await pair.prefiller.end_session("g")
    for source in (pair.source(held.key), KvSource("http://127.0.0.1:9", TOKEN, held.key)):
        found = await pair.decoder.generate(replace(each, kv=source))
        check(each, found.tokens.tolist(), found.logprobs, POLICY[NEW])


async def test_no_file_is_left_of_turns_and_sessions_that_are_over(pair: Pair) -> None:
    await pair.serve(OLD)
    await turn(pair, OLD, request("l", prompt(40, 300), 5, temperature=0.0), 2 * BLOCK)
    held = await pair.prefiller.prefill("m", request("m", prompt(41, 300), 1).tokens)
    assert f"{held.key}/rank-0.safetensors" in {"/".join(file.parts[-2:]) for file in pair.files()}
    for session in "abcdglmuv":
        await pair.prefiller.end_session(session)
    for index in range(6):
        await pair.prefiller.end_session(f"m{index}")
    assert pair.files() == []


async def test_held_kv_is_bounded(pair: Pair) -> None:
    await pair.serve(OLD)
    each = [request(f"b{index}", prompt(50 + index, 150), 1) for index in range(10)]
    held = [await pair.prefiller.prefill(one.session, one.tokens) for one in each]
    assert len(pair.files()) == 8  # max_running of these engines
    with pytest.raises(RpcError, match="kv_gone"):
        await pair.prefiller.export_kv(held[0].key, 0, 100)
    assert (await pair.prefiller.export_kv(held[9].key, 0, 100))["content"]
