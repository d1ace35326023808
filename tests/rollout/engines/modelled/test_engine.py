"""The modelled engine behind its protocol, on virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from infra.clock import now
from infra.rpc import RpcError, RpcServer
from infra.virtual_time import run_virtual
from tasks.rollout.engines.base import GenerateRequest, Generation, KvEngine, KvSource, PullingEngine
from tasks.rollout.engines.modelled.engine import ModelledEngine
from tasks.rollout.engines.modelled.limits import EngineLimits
from tasks.rollout.engines.service import engine_handlers
from tasks.trajectory import StopReason
from tests.rollout.engines.modelled.reference import Linear

END = 2
LIMITS = EngineLimits(max_running=4, max_batch_tokens=64, max_context=512, block_tokens=4)
TIMING = Linear()


def request(session: str, context: int = 20, most: int = 400, seed: int = 0, **more: Any) -> GenerateRequest:
    return GenerateRequest(session, np.ones(context, np.int32), most, temperature=1.0, seed=seed, **more)


def engine(
    lengths: Callable[[GenerateRequest], int] = lambda _: 50, pull_s: float = 2.0, **more: Any
) -> ModelledEngine:
    async def pull(version: int) -> None:
        await asyncio.sleep(pull_s)

    settings: dict[str, Any] = {"timing": TIMING, "limits": LIMITS, "kv_tokens": 2000, "update_s": 0.5}
    return ModelledEngine(response_tokens=lengths, end_token=END, pull=pull, **(settings | more))


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    return lambda: run_virtual(test())


def prefill_s(tokens: int) -> float:
    return TIMING.iteration + TIMING.token * tokens + TIMING.attended * tokens * tokens / 2


@virtually
async def test_a_turn_takes_a_prefill_and_its_decodes() -> None:
    async with engine() as one:
        done = await one.generate(request("s"))
        assert done.stop is StopReason.STOP
        assert len(done.tokens) == len(done.logprobs) == len(done.versions) == 50
        assert done.tokens[-1] == END
        assert (done.tokens[1:-1] == 1).all()
        assert done.tokens[0] not in (1, END)
        decodes = sum(TIMING.iteration + TIMING.decode + TIMING.context * (20 + k) for k in range(49))
        assert now() == pytest.approx(prefill_s(20) + decodes, abs=1e-9)


@virtually
async def test_the_first_token_is_the_seeds_own() -> None:
    async with engine() as one:
        first = [int((await one.generate(request("s", seed=seed))).tokens[0]) for seed in (1, 2, 1)]
    assert first[0] == first[2] != first[1]
    assert all(1 <= token < 2**31 - 1 for token in first)


@virtually
async def test_a_budget_or_the_context_cuts_a_turn() -> None:
    async with engine() as one:
        cut, full = await asyncio.gather(
            one.generate(request("s", most=7)), one.generate(request("t", context=500))
        )
    assert (len(cut.tokens), cut.stop) == (7, StopReason.LENGTH)
    assert (len(full.tokens), full.stop) == (12, StopReason.LENGTH)
    assert END not in cut.tokens


@virtually
async def test_a_turn_that_goes_on_elsewhere_keeps_its_length() -> None:
    async with engine() as one:
        rest = await one.generate(request("s", context=50, sampled_before=30))
    assert len(rest.tokens) == 20
    assert rest.tokens[0] == 1
    assert rest.tokens[-1] == END


@virtually
async def test_what_nobody_can_serve_is_refused() -> None:
    async with engine() as one:
        running = asyncio.create_task(one.generate(request("s")))
        await asyncio.sleep(0.1)
        for bad, code in (
            (request("s"), "session_busy"),
            (request("t", context=512), "context_overflow"),
            (request("t", context=0), "invalid_request"),
        ):
            with pytest.raises(RpcError) as error:
                await one.generate(bad)
            assert error.value.code == code
        with pytest.raises(RpcError) as error:
            await one.load_weights(1)
        assert error.value.code == "not_suspended"
        await running
    with pytest.raises(RpcError, match="stopped"):
        await one.generate(request("s"))


def test_kv_that_holds_no_context_is_refused() -> None:
    with pytest.raises(ValueError, match="KV of 500 tokens, a context may have 512"):
        engine(kv_tokens=500)


@virtually
async def test_tokens_bear_the_version_that_sampled_them() -> None:
    async with engine() as one:
        turn = asyncio.create_task(one.generate(request("s")))
        await asyncio.sleep(prefill_s(20) + 10.5 * TIMING.decode_seconds(1, 25, 1))
        await one.suspend()
        frozen, before = now(), (await one.stats()).decode_tokens
        await one.load_weights(1)
        assert now() == pytest.approx(frozen + 2.0 + 0.5)
        assert (await one.stats()).decode_tokens == before
        await one.resume()
        assert await one.recompute() == 20 + before - 1
        done = await turn
        assert done.versions.tolist() == [0] * before + [1] * (50 - before)


@virtually
async def test_a_version_pulled_ahead_is_put_in_place_at_once() -> None:
    async with engine() as one:
        turn = asyncio.create_task(one.generate(request("s", most=400)))
        await one.prefetch(3)
        await turn
        await one.suspend()
        began = now()
        await one.load_weights(3)
        assert now() == pytest.approx(began + 0.5)
        assert (await one.stats()).version == 3
        await one.resume()


@virtually
async def test_an_aborted_turn_returns_what_it_has_at_once() -> None:
    async with engine() as one:
        turn = asyncio.create_task(one.generate(request("s")))
        await asyncio.sleep(prefill_s(20) + 10.5 * TIMING.decode_seconds(1, 25, 1))
        began = now()
        await one.abort(["s", "unknown"], StopReason.STALE)
        done = await turn
        assert now() == began
        assert done.stop is StopReason.STALE
        assert len(done.tokens) == 11


@virtually
async def test_a_caller_that_gives_up_frees_its_place() -> None:
    async with engine() as one:
        turn = asyncio.create_task(one.generate(request("s")))
        await asyncio.sleep(0.2)
        turn.cancel()
        await asyncio.wait([turn])
        assert (await one.stats()).running == 0
        await one.generate(request("s"))


@virtually
async def test_a_later_turn_finds_its_session_and_a_group_its_prompt() -> None:
    async with engine(prompt_of=lambda asked: (asked.session[0], 16)) as one:
        await one.generate(request("a1", context=20))
        assert (await one.stats()).cached_tokens == 0
        await one.generate(request("a2", context=20))
        assert (await one.stats()).cached_tokens == 16
        await one.generate(request("a1", context=80))
        # 69 tokens were computed, whole blocks of four are kept.
        assert (await one.stats()).cached_tokens == 16 + 68


@virtually
async def test_busy_seconds_and_steps_are_right_in_the_middle() -> None:
    async with engine(lengths=lambda _: 300) as one:
        await asyncio.sleep(5.0)
        turn = asyncio.create_task(one.generate(request("s")))
        half = prefill_s(20) + TIMING.decode_seconds(1, 20, 100) + 1e-6
        await asyncio.sleep(half)
        stats = await one.stats()
        assert stats.busy_seconds == pytest.approx(half, abs=1e-9)
        assert stats.steps == stats.decode_tokens == 101
        await turn
        busy = (await one.stats()).busy_seconds
        await asyncio.sleep(5.0)
        assert (await one.stats()).busy_seconds == busy == pytest.approx(now() - 10.0)


@virtually
async def test_another_engine_takes_its_kv() -> None:
    async with engine() as prefiller, engine(kv_transfer_s=lambda tokens: tokens * 0.01) as decoder:
        assert isinstance(decoder, KvEngine)
        assert isinstance(decoder, PullingEngine)
        server = RpcServer(engine_handlers(prefiller))
        url = await server.start("inproc")
        held = await prefiller.prefill("s", np.ones(60, np.int32))
        assert held.tokens == 59
        began = now()
        source = KvSource(url, None, held.key)
        done: Generation = await decoder.generate(request("s", context=60, most=2, kv=source))
        assert len(done.tokens) == 2
        # Whole blocks of four came, and the four tokens after them are computed.
        spent = 0.56 + TIMING.iteration + 4 * TIMING.token + TIMING.attended * 4 * (56 + 2)
        assert now() - began == pytest.approx(spent + TIMING.decode_seconds(1, 60, 1))
        stats = await decoder.stats()
        assert (stats.kv_imported_tokens, stats.prefill_tokens) == (56, 4)
        assert (await prefiller.stats()).kv_exported_tokens == 56
        await server.stop()


@virtually
async def test_kv_of_a_prompt_that_its_group_shares_is_handed_over_too() -> None:
    async with engine(prompt_of=lambda asked: ("group", 59)) as prefiller:
        for session in ("s", "t"):
            held = await prefiller.prefill(session, np.ones(60, np.int32))
            assert (await prefiller.export_kv(held.key, 0, held.tokens))["count"] == 56
        await prefiller.end_session("s")
        with pytest.raises(RpcError, match="KV of 0 tokens"):
            await prefiller.export_kv("s", 0, 59)


@virtually
async def test_a_turn_whose_kv_is_gone_computes_it() -> None:
    async with engine() as prefiller, engine() as decoder:
        server = RpcServer(engine_handlers(prefiller))
        url = await server.start("inproc")
        done = await decoder.generate(request("s", context=60, kv=KvSource(url, None, "nobody")))
        assert len(done.tokens) == 50
        assert (await decoder.stats()).prefill_tokens == 60
        await server.stop()
