"""What every engine that batches promises, whatever computes its tokens."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from infra.rpc import RpcError
from tasks.rollout.config import SimulatedEngineConfig
from tasks.rollout.engines.base import HostedEngine
from tasks.rollout.engines.simulated import SimulatedEngine
from tasks.trajectory import StopReason
from tests.rollout.engines import tiny_models
from tests.rollout.engines.tiny_models import MAX_CONTEXT, VOCABULARY, prompt, request

STOP = 2
MakeEngine = Callable[..., HostedEngine]


def make_simulated(**settings: Any) -> SimulatedEngine:
    return SimulatedEngine(
        settings=SimulatedEngineConfig(kind="simulated", decode_s=0.001, **settings),
        vocabulary=VOCABULARY,
        stop_tokens={STOP},
        max_context=MAX_CONTEXT,
        require_published=lambda version: None,
    )


@pytest.fixture(params=["torch", "simulated"])
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    return tiny_models.make_engine if request.param == "torch" else make_simulated


async def when(engine: HostedEngine, **at_least: int) -> None:
    async with asyncio.timeout(30):
        while True:
            stats = await engine.stats()
            if all(getattr(stats, name) >= value for name, value in at_least.items()):
                return
            await asyncio.sleep(0)


async def test_a_request_samples_its_budget_with_equal_arrays(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        found = await engine.generate(request(count=20))
        stats = await engine.stats()
    assert found.stop is StopReason.LENGTH
    assert len(found.tokens) == len(found.logprobs) == len(found.versions) == 20
    assert (found.tokens.dtype, found.logprobs.dtype) == (np.int32, np.float32)
    assert ((found.tokens >= 0) & (found.tokens < VOCABULARY)).all()
    assert (stats.prefill_tokens, stats.decode_tokens, stats.cached_tokens) == (3, 20, 0)


async def test_draws_are_the_seeds_whatever_else_runs(make_engine: MakeEngine) -> None:
    requests = [request(f"s{i}", prompt(i, 3 + i), 4 + i, seed=i) for i in range(12)]
    async with make_engine(max_running=5, max_batch_tokens=32) as engine:
        together = await asyncio.gather(*(engine.generate(each) for each in requests))
    async with make_engine() as engine:
        alone = [await engine.generate(each) for each in requests]
    assert [found.tokens.tolist() for found in together] == [found.tokens.tolist() for found in alone]
    assert len({tuple(found.tokens[:4].tolist()) for found in together}) == 12


async def test_an_interrupted_turn_goes_on_with_the_draws_it_would_have_had(make_engine: MakeEngine) -> None:
    context = prompt(4, 8)
    async with make_engine() as engine:
        whole = (await engine.generate(request("a", context, 12, seed=3))).tokens.tolist()
        rest = request("b", context + whole[:5], 7, seed=3)
        again = await engine.generate(type(rest)(**{**_fields(rest), "sampled_before": 5}))
    assert again.tokens.tolist() == whole[5:]


def _fields(made: Any) -> dict[str, Any]:
    return {name: getattr(made, name) for name in type(made).__dataclass_fields__}


async def test_a_next_turn_reuses_what_is_kept(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        context = prompt(3, 10)
        first = await engine.generate(request(tokens=context, count=3))
        context += [*first.tokens.tolist(), *prompt(1, 5)]
        await engine.generate(request(tokens=context, count=3, seed=1))
        stats = await engine.stats()
    assert stats.cached_tokens == 12
    assert stats.prefill_tokens == 10 + 6
    assert (stats.sessions, stats.running, stats.waiting) == (1, 0, 0)


async def test_an_update_freezes_restamps_and_recomputes(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        running = asyncio.create_task(engine.generate(request("a", prompt(5, 15), 30)))
        await when(engine, decode_tokens=10)
        await engine.suspend()
        frozen = await engine.stats()
        await asyncio.sleep(0.02)
        assert (await engine.stats()).steps == frozen.steps
        assert frozen.suspended
        await engine.load_weights(1)
        await engine.resume()
        recomputed = await engine.recompute()
        found = await running
        stats = await engine.stats()
    sampled = frozen.decode_tokens
    assert found.versions.tolist() == [0] * sampled + [1] * (30 - sampled)
    assert recomputed == stats.recomputed_tokens == 15 + sampled - 1
    assert stats.version == 1


async def test_an_idle_session_is_forgotten_at_an_update(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        await engine.generate(request(count=2))
        await engine.suspend()
        await engine.load_weights(1)
        await engine.resume()
        assert (await engine.stats()).sessions == 0


async def test_weights_change_only_while_suspended(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        with pytest.raises(RpcError, match="not_suspended"):
            await engine.load_weights(1)
        assert (await engine.stats()).version == 0


async def test_progress_tells_of_running_turns_what_is_not_told_yet(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        running = asyncio.create_task(engine.generate(request("a", count=80)))
        await when(engine, decode_tokens=6)
        await engine.suspend()
        told = await engine.progress({"a": 2, "unknown": 0})  # type: ignore[attr-defined]
        sampled = (await engine.stats()).decode_tokens
        await engine.resume()
        found = await running
    assert told["a"].tokens.tolist() == found.tokens[2:sampled].tolist()
    assert told["a"].logprobs.tobytes() == found.logprobs[2:sampled].tobytes()
    assert len(told["unknown"].tokens) == 0


async def test_abort_returns_what_was_sampled_with_its_reason(make_engine: MakeEngine) -> None:
    async with make_engine(max_running=2) as engine:
        tasks = [asyncio.create_task(engine.generate(request(f"s{i}", count=80, seed=i))) for i in range(3)]
        await when(engine, decode_tokens=10)
        await engine.abort(["s0", "s2", "unknown"], StopReason.STALE)
        running, waiting = await tasks[0], await tasks[2]
        assert running.stop is StopReason.STALE
        assert 0 < len(running.tokens) == len(running.logprobs) == len(running.versions) < 80
        assert (waiting.stop, len(waiting.tokens)) == (StopReason.STALE, 0)
        assert len((await tasks[1]).tokens) == 80


async def test_abort_takes_effect_while_suspended(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        task = asyncio.create_task(engine.generate(request(count=80)))
        await when(engine, decode_tokens=2)
        await engine.suspend()
        await engine.abort(["s"], StopReason.CANCELLED)
        assert (await task).stop is StopReason.CANCELLED


async def test_cancelling_the_caller_ends_its_request_alone(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        tasks = [asyncio.create_task(engine.generate(request(f"s{i}", count=60, seed=i))) for i in range(2)]
        await when(engine, decode_tokens=4)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert (await engine.stats()).running == 1
        assert len((await tasks[1]).tokens) == 60
        assert len((await engine.generate(request("s0", count=3))).tokens) == 3


async def test_ending_a_session_frees_its_place_and_ends_its_request(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        task = asyncio.create_task(engine.generate(request(count=80)))
        await when(engine, decode_tokens=2)
        await engine.end_session("s")
        assert (await task).stop is StopReason.CANCELLED
        assert (await engine.stats()).sessions == 0


async def test_a_context_without_room_is_a_typed_error_and_a_tight_one_is_cut(
    make_engine: MakeEngine,
) -> None:
    async with make_engine() as engine:
        with pytest.raises(RpcError) as raised:
            await engine.generate(request(tokens=prompt(0, MAX_CONTEXT)))
        assert raised.value.code == "context_overflow"
        found = await engine.generate(request(tokens=prompt(0, MAX_CONTEXT - 2), count=9))
        assert (len(found.tokens), found.stop) == (2, StopReason.LENGTH)


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": []}, {"tokens": [3, VOCABULARY]}, {"tokens": [-1]}, {"count": 0}, {"temperature": -0.5}],
)
async def test_a_wrong_request_is_refused(make_engine: MakeEngine, wrong: dict[str, Any]) -> None:
    async with make_engine() as engine:
        with pytest.raises(RpcError) as raised:
            await engine.generate(request(**wrong))
        assert raised.value.code == "invalid_request"


async def test_a_second_request_of_a_session_is_refused(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        first = asyncio.create_task(engine.generate(request(count=20)))
        await when(engine, running=1)
        with pytest.raises(RpcError) as raised:
            await engine.generate(request(count=1))
        assert raised.value.code == "session_busy"
        assert len((await first).tokens) == 20


async def test_a_stopped_engine_fails_its_callers(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        task = asyncio.create_task(engine.generate(request(count=80)))
        await when(engine, decode_tokens=2)
    with pytest.raises(RpcError, match="engine_failed"):
        await task


async def test_weights_pulled_ahead_are_put_in_place_and_not_pulled_again() -> None:
    pulled: list[int] = []

    def load(version: int) -> Any:
        pulled.append(version)
        return tiny_models.load_version(version)

    async with tiny_models.make_engine(load=load) as engine, tiny_models.make_engine(version=2) as other:
        running = asyncio.create_task(engine.generate(request("a", count=40)))
        await engine.prefetch(1)
        await engine.prefetch(2)  # a newer one came before the first was taken
        assert pulled == [1, 2]
        assert (await running).versions.tolist() == [0] * 40
        await engine.suspend()
        await engine.load_weights(2)
        await engine.resume()
        assert pulled == [1, 2]
        found = await engine.generate(request("b", prompt(1, 9), 6, temperature=0.0))
        expected = await other.generate(request("b", prompt(1, 9), 6, temperature=0.0))
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.versions.tolist() == [2] * 6
        await engine.suspend()
        await engine.load_weights(2)
        assert pulled == [1, 2, 2]
