"""Turns that one engine prefills and another decodes, over real RPC: equal to those of one engine alone."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from blocks.weight_store import WeightStore
from infra.object_store import ObjectStore
from infra.processes import ServiceProcess
from infra.rpc import RpcClient, RpcError
from tasks.rollout.engines import kv_imports
from tasks.rollout.engines.base import GenerateRequest, Generation, KvSource
from tasks.rollout.engines.client import RemoteEngine
from tasks.rollout.engines.kv_blocks import LAYOUT
from tasks.rollout.engines.torch import TorchEngine
from tasks.trajectory import StopReason
from tasks.weights.publication import publish
from tests.rollout.engines.kv_pairs import TOKEN, pair, serve, when
from tests.rollout.engines.tiny_models import MAX_CONTEXT, make_engine, make_model, prompt, request

NOWHERE = KvSource("http://127.0.0.1:9", TOKEN, "s")  # the discard port: nobody listens


def same(found: Generation, expected: Generation) -> None:
    assert found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    assert found.versions.tolist() == expected.versions.tolist()
    assert found.stop is expected.stop


async def alone(each: GenerateRequest, version: int = 0) -> Generation:
    async with make_engine(version) as engine:
        return await engine.generate(replace(each, kv=None))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_turns_are_those_of_one_engine(temperature: float) -> None:
    turns = [
        request(f"s{i}", prompt(i, 2 + 9 * i), 6 + i, temperature=temperature, seed=100 + i) for i in range(8)
    ]
    async with pair() as both:
        found = await asyncio.gather(*(both.generate(each) for each in turns))
        prefilled, decoded = await both.prefiller.stats(), await both.decoder.stats()
    for each, answer in zip(turns, found, strict=True):
        same(answer, await alone(each))
    contexts = sum(len(each.tokens) for each in turns)
    assert prefilled.prefill_tokens == prefilled.kv_exported_tokens == contexts - len(turns)
    assert decoded.kv_imported_tokens == contexts - len(turns)
    assert decoded.prefill_tokens == len(turns)  # the last token of each, for its logits
    assert prefilled.decode_tokens == 0


async def test_later_turns_hand_over_and_compute_only_what_came_since() -> None:
    context = prompt(1, 30)
    async with pair() as both, make_engine() as reference:
        for turn in range(3):
            each = request("s", context, 4, seed=turn)
            answer = await both.generate(each)
            same(answer, await reference.generate(each))
            context = [*context, *answer.tokens.tolist(), *prompt(turn, 11)]
        prefilled, decoded = await both.prefiller.stats(), await both.decoder.stats()
    # Contexts of 30, 45 and 60 tokens. The prefill engine keeps 29 and 44 of them from the turns before; the
    # decoding engine has those and the sampled tokens but the last, so 11 + 1 - 1 are fetched.
    assert prefilled.prefill_tokens == 29 + (44 - 29) + (59 - 44)
    assert prefilled.cached_tokens == 29 + 44
    assert prefilled.kv_exported_tokens == decoded.kv_imported_tokens == 29 + 11 + 11
    assert decoded.cached_tokens == 33 + 48
    assert decoded.prefill_tokens == 3


async def test_a_turn_of_a_prefilled_session_can_go_on_without_a_prefill_worker() -> None:
    context = prompt(2, 40)
    async with pair() as both, make_engine() as reference:
        first = request("s", context, 5, seed=1)
        answer = await both.generate(first)
        same(answer, await reference.generate(first))
        second = request("s", [*context, *answer.tokens.tolist(), 7, 8], 5, seed=2)
        same(await both.decoder.generate(second), await reference.generate(second))
        assert (await both.decoder.stats()).prefill_tokens == 1 + 3


async def test_an_update_in_mid_turn_recomputes_the_kv_where_it_is_decoded() -> None:
    each = request("s", prompt(3, 40), 30, temperature=0.0)
    async with pair() as both, make_engine() as reference:

        async def update(engine: TorchEngine, task: asyncio.Task[Generation]) -> Generation:
            await when(engine, decode_tokens=12)
            await engine.suspend()
            stats = await engine.stats()
            await engine.load_weights(1)
            await engine.resume()
            # All that had KV: the context and what was sampled, but for the last token.
            assert await engine.recompute() == 40 + stats.decode_tokens - 1
            return await task

        found = await update(both.decoder, asyncio.create_task(both.generate(each)))
        assert sorted(set(found.versions.tolist())) == [0, 1]
        old = int((found.versions == 0).sum())
        first = await reference.generate(replace(each, max_new_tokens=old))
        assert found.tokens[:old].tolist() == first.tokens.tolist()
    async with make_engine(1) as renewed:
        rest = await renewed.generate(
            request("s", [*each.tokens.tolist(), *first.tokens.tolist()], 30 - old, temperature=0.0)
        )
    assert found.tokens[old:].tolist() == rest.tokens.tolist()
    np.testing.assert_allclose(found.logprobs[old:], rest.logprobs, atol=1e-5)


async def test_kv_of_another_version_is_refused_and_computed_anew() -> None:
    each = request("s", prompt(4, 50), 6, seed=3)
    async with pair() as both:
        held = await both.prefill("s", each.tokens)
        await both.decoder.suspend()
        await both.decoder.load_weights(1)
        await both.decoder.resume()
        found = await both.decoder.generate(replace(each, kv=both.source(held.key)))
        stats = await both.decoder.stats()
    same(found, await alone(each, version=1))
    assert (stats.kv_imported_tokens, stats.prefill_tokens) == (0, 50)


async def test_kv_that_was_fetched_before_an_update_is_not_used_after_it() -> None:
    each = request("s", prompt(5, 50), 6, seed=3)
    async with pair() as both:
        held = await both.prefill("s", each.tokens)
        await both.decoder.suspend()
        waiting = asyncio.create_task(both.decoder.generate(replace(each, kv=both.source(held.key))))
        await when(both.prefiller, kv_exported_tokens=49)
        await when(both.decoder, waiting=1)
        await both.decoder.load_weights(1)
        await both.decoder.resume()
        found = await waiting
        stats = await both.decoder.stats()
    same(found, await alone(each, version=1))
    assert stats.kv_imported_tokens == 0


async def test_an_updated_prefill_engine_holds_nothing_of_the_old_weights() -> None:
    each = request("s", prompt(6, 50), 6, seed=3)
    async with pair() as both:
        held = await both.prefill("s", each.tokens)
        for engine in (both.prefiller, both.decoder):
            await engine.suspend()
            await engine.load_weights(1)
            await engine.resume()
        with pytest.raises(RpcError, match="kv_gone"):
            await both.prefiller.export_kv(held.key, 0, 10)
        same(
            await both.decoder.generate(replace(each, kv=both.source(held.key))), await alone(each, version=1)
        )
        assert (await both.decoder.stats()).kv_imported_tokens == 0
        same(await both.generate(replace(each, session="t")), await alone(each, version=1))
        assert (await both.decoder.stats()).kv_imported_tokens == 49


async def test_an_update_in_mid_prefill_gives_kv_of_the_new_weights() -> None:
    each = request("s", prompt(7, 90), 6, seed=3)
    async with pair(prefill_settings={"max_batch_tokens": 10}) as both:
        prefill = asyncio.create_task(both.prefill("s", each.tokens))
        await when(both.prefiller, prefill_tokens=30)
        for engine in (both.prefiller, both.decoder):
            await engine.suspend()
            await engine.load_weights(1)
            await engine.resume()
        held = await prefill
        assert (held.version, held.tokens) == (1, 89)
        same(
            await both.decoder.generate(replace(each, kv=both.source(held.key))), await alone(each, version=1)
        )
        assert (await both.decoder.stats()).kv_imported_tokens == 89


async def test_a_prefill_worker_that_is_gone_leaves_the_turn_to_the_decoder() -> None:
    each = request("s", prompt(8, 30), 6, seed=3)
    async with make_engine() as decoder:
        found = await decoder.generate(replace(each, kv=NOWHERE))
        assert (await decoder.stats()).prefill_tokens == 30
    same(found, await alone(each))


async def test_what_came_of_kv_before_it_was_lost_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    each = request("s", prompt(9, 81), 6, seed=3)
    async with pair() as both:
        monkeypatch.setattr(kv_imports, "BLOCK_BYTES", 10 * both.decoder.kv_shape.bytes_per_token)
        held = await both.prefill("s", each.tokens)
        export = both.prefiller.export_kv

        async def lost_after_thirty(key: str, start: int, count: int) -> dict[str, Any]:
            if start == 30:
                await both.prefiller.end_session(key)
            return await export(key, start, count)

        monkeypatch.setattr(both.prefiller, "export_kv", lost_after_thirty)
        found = await both.decoder.generate(replace(each, kv=both.source(held.key)))
        stats = await both.decoder.stats()
    same(found, await alone(each))
    assert (stats.kv_imported_tokens, stats.prefill_tokens) == (30, 51)


@pytest.mark.parametrize("part", ["kv", "tokens", "checksum", "shape"])
async def test_damaged_kv_is_not_used(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    each = request("s", prompt(10, 40), 6, seed=3)
    async with pair() as both:
        held = await both.prefill("s", each.tokens)
        export = both.prefiller.export_kv

        async def damaged(key: str, start: int, count: int) -> dict[str, Any]:
            block = await export(key, start, count)
            assert block["layout"] == LAYOUT
            content = {"kv": bytearray(block["kv"]), "tokens": bytearray(block["tokens"])}
            for each in content.values():
                each[5] ^= 1
            changed = {"kv": bytes(content["kv"]), "tokens": bytes(content["tokens"]), "checksum": "0" * 32}
            return {**block, part: {**changed, "shape": [1, *block["shape"][1:]]}[part]}

        monkeypatch.setattr(both.prefiller, "export_kv", damaged)
        found = await both.decoder.generate(replace(each, kv=both.source(held.key)))
        assert (await both.decoder.stats()).kv_imported_tokens == 0
    same(found, await alone(each))


async def test_kv_of_another_context_is_not_used() -> None:
    each = request("s", prompt(11, 40), 6, seed=3)
    async with pair() as both:
        held = await both.prefill("other", prompt(12, 40))
        found = await both.decoder.generate(replace(each, kv=both.source(held.key)))
        assert (await both.decoder.stats()).kv_imported_tokens == 0
    same(found, await alone(each))


async def test_held_kv_is_bounded_and_the_oldest_goes_first() -> None:
    turns = [request(f"s{i}", prompt(20 + i, 30), 4, seed=i) for i in range(3)]
    async with pair(prefill_settings={"max_sessions": 2, "max_running": 2}, max_running=4) as both:
        held = [await both.prefill(each.session, each.tokens) for each in turns]
        assert (await both.prefiller.stats()).sessions == 2
        for each, kv in zip(turns, held, strict=True):
            same(
                await both.decoder.generate(replace(each, kv=both.source(kv.key))),
                await alone(each),
            )
        assert (await both.decoder.stats()).kv_imported_tokens == 2 * 29
        await both.prefiller.end_session("s2")
        assert (await both.prefiller.stats()).sessions == 1


@pytest.mark.parametrize("end", ["abort", "end_session", "cancel"])
async def test_a_turn_ends_while_its_kv_is_on_the_way(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    each = request("s", prompt(13, 40), 6, seed=3)
    async with pair() as both:
        held = await both.prefill("s", each.tokens)
        asked, export = asyncio.Event(), both.prefiller.export_kv

        async def never(key: str, start: int, count: int) -> dict[str, Any]:
            asked.set()
            return await asyncio.Event().wait()  # type: ignore[return-value]

        monkeypatch.setattr(both.prefiller, "export_kv", never)
        turn = asyncio.create_task(both.decoder.generate(replace(each, kv=both.source(held.key))))
        await asked.wait()
        assert (await both.decoder.stats()).waiting == 1
        with pytest.raises(RpcError, match="session_busy"):
            await both.decoder.generate(each)
        if end == "abort":
            await both.decoder.abort(["s"], StopReason.STALE)
            found = await turn
            assert (len(found.tokens), found.stop) == (0, StopReason.STALE)
        elif end == "end_session":
            await both.decoder.end_session("s")
            assert (await turn).stop is StopReason.CANCELLED
        else:
            turn.cancel()
            await asyncio.wait([turn])
        stats = await both.decoder.stats()
        assert (stats.waiting, stats.running, stats.sessions) == (0, 0, 0)
        monkeypatch.setattr(both.prefiller, "export_kv", export)
        same(await both.decoder.generate(replace(each, kv=both.source(held.key))), await alone(each))


async def test_a_source_that_does_not_answer_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    each = request("s", prompt(14, 40), 6, seed=3)
    async with make_engine() as prefiller, serve(prefiller) as (_, url):
        held = await prefiller.prefill("s", each.tokens)

        async def frozen(key: str, start: int, count: int) -> dict[str, Any]:
            return await asyncio.Event().wait()  # type: ignore[return-value]

        monkeypatch.setattr(prefiller, "export_kv", frozen)
        async with make_engine(kv_limit_s=0.05) as decoder:
            found = await decoder.generate(replace(each, kv=KvSource(url, TOKEN, held.key)))
    same(found, await alone(each))


async def test_aborting_a_prefill_ends_it() -> None:
    async with make_engine() as engine:
        await engine.suspend()
        prefill = asyncio.create_task(engine.prefill("s", np.array(prompt(15, 40), np.int32)))
        await when(engine, waiting=1)
        await engine.abort(["s"], StopReason.STALE)
        with pytest.raises(RpcError) as raised:
            await prefill
        assert (raised.value.code, raised.value.message) == ("prefill_aborted", "stale")
        await engine.resume()
        with pytest.raises(RpcError, match="invalid_request"):
            await engine.prefill("s", np.array([5], np.int32))
        with pytest.raises(RpcError, match="context_overflow"):
            await engine.prefill("s", np.array(prompt(0, MAX_CONTEXT + 1), np.int32))


async def test_a_turn_moves_to_another_engine_with_its_kv_and_goes_on_as_it_was() -> None:
    """What a migration between decoding engines is: the same export, from an engine that is in mid-turn."""
    each = request("s", prompt(16, 40), 30, seed=9)
    async with make_engine() as source, make_engine() as target, serve(source) as (_, url):
        turn = asyncio.create_task(source.generate(each))
        await when(source, decode_tokens=10)
        await source.suspend()
        before = (await source.stats()).decode_tokens
        context = [*each.tokens.tolist(), *(await source.progress({"s": 0}))["s"].tokens.tolist()]
        moved = replace(
            each,
            tokens=np.array(context, np.int32),
            max_new_tokens=30 - before,
            sampled_before=before,
            kv=KvSource(url, TOKEN, "s"),
        )
        rest = await target.generate(moved)
        await source.abort(["s"], StopReason.CANCELLED)
        first = await turn
        stats = await target.stats()
    whole = await alone(each)
    assert [*first.tokens.tolist(), *rest.tokens.tolist()] == whole.tokens.tolist()
    np.testing.assert_allclose([*first.logprobs, *rest.logprobs], whole.logprobs, atol=1e-5)
    assert (stats.prefill_tokens, stats.kv_imported_tokens) == (1, 40 + before - 1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, ServiceProcess]]:
    folder = tmp_path_factory.mktemp("prefill-decode")
    make_model(0).save_pretrained(folder / "model")
    publish(WeightStore(ObjectStore(str(folder / "weights"))), 1, make_model(1).state_dict().items())
    settings = {
        "model": str(folder / "model"),
        "engine": {"kind": "torch", "max_running": 4, "max_sessions": 16},
        "weights": {"url": str(folder / "weights")},
        "version": None,
        "max_context": MAX_CONTEXT,
        "token": TOKEN,
    }
    started: dict[str, ServiceProcess] = {}
    try:
        for role in ("prefill", "decode"):
            started[role] = await ServiceProcess.start(
                role,
                "tasks.rollout.engines.service",
                {**settings, "role": role},
                folder / f"{role}.log",
            )
        yield started
    finally:
        for service in started.values():
            await service.stop()


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_services_hand_kv_over_and_count_it(services: dict[str, ServiceProcess]) -> None:
    clients = {
        role: await RpcClient(service.url, token=TOKEN).connect() for role, service in services.items()
    }
    engines = {role: RemoteEngine(client) for role, client in clients.items()}
    each = request("s", prompt(17, 60), 8, temperature=0.0, seed=5)
    held = await engines["prefill"].prefill("s", each.tokens)
    assert (held.tokens, held.version) == (59, 0)
    found = await engines["decode"].generate(
        replace(each, kv=KvSource(services["prefill"].url, TOKEN, held.key))
    )
    async with make_engine(stop_tokens=[2]) as reference:
        same(found, await reference.generate(each))
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{services['decode'].url}/metrics") as response,
    ):
        lines = (await response.text()).splitlines()
    assert "tutti_engine_kv_imported_tokens_total 59.0" in lines
    assert (await engines["prefill"].stats()).kv_exported_tokens == 59
    with pytest.raises(RpcError, match="kv_gone"):
        await engines["prefill"].export_kv("s", 59, 1)
    for client in clients.values():
        await client.close()
