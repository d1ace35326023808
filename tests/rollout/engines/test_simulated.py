import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from blocks.weight_store import WeightStore
from infra.object_store import ObjectStore
from infra.processes import ServiceProcess
from infra.rpc import RpcClient, RpcError
from tasks.rollout.config import RolloutConfig, SimulatedEngineConfig
from tasks.rollout.engines.base import Generation
from tasks.rollout.engines.client import RemoteEngine
from tasks.rollout.engines.simulated import SimulatedEngine, end_probabilities
from tasks.trajectory import StopReason
from tasks.weights.publication import publish
from tests.rollout.engines.tiny_models import MAX_CONTEXT, VOCABULARY, make_model, prompt, request

STOPS = {2, 5}


def settings(**options: Any) -> SimulatedEngineConfig:
    return SimulatedEngineConfig(kind="simulated", **options)


def make_engine(**options: Any) -> SimulatedEngine:
    return SimulatedEngine(
        settings=settings(**{"decode_s": 0.0, **options}),
        vocabulary=VOCABULARY,
        stop_tokens=STOPS,
        max_context=MAX_CONTEXT,
        require_published=lambda version: None,
    )


async def many(count: int, **options: Any) -> list[Generation]:
    async with make_engine(max_sessions=count, max_running=count, **options) as engine:
        found: list[Generation] = await asyncio.gather(
            *(engine.generate(request(f"s{i}", count=60, seed=i)) for i in range(count))
        )
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Timers come due at once, and the clock shows the time they were set for."""

    def __init__(self) -> None:
        super().__init__()
        self._skipped = 0.0

    def time(self) -> float:
        return self._skipped

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._skipped = max(self._skipped, self._scheduled[0].when())
        super()._run_once()


def in_virtual_time(coroutine: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)


def test_an_iteration_takes_its_prefill_its_step_and_its_sequences() -> None:
    """By hand, of two requests with 10 and 20 tokens of context and 4 and 2 to sample: one iteration of 30
    tokens of prefill and 2 rows, one of 2 rows, two of 1 row."""

    async def elapsed() -> tuple[float, float, int]:
        loop = asyncio.get_running_loop()
        options = {"prefill_s_per_token": 0.1, "decode_s": 5.0, "decode_s_per_sequence": 1.0}
        async with make_engine(**options) as engine:
            began = loop.time()
            await asyncio.gather(
                engine.generate(request("a", prompt(0, 10), 4)),
                engine.generate(request("b", prompt(1, 20), 2)),
            )
            stats = await engine.stats()
        return loop.time() - began, stats.busy_seconds, stats.steps

    took, busy, steps = in_virtual_time(elapsed())
    assert busy == pytest.approx((3.0 + 5.0 + 2.0) + (5.0 + 2.0) + 2 * (5.0 + 1.0))
    assert took == pytest.approx(busy, abs=0.01)
    assert steps == 4


def test_an_update_takes_its_time_and_what_ran_is_computed_again() -> None:
    async def elapsed() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        async with make_engine(prefill_s_per_token=1.0, decode_s=1.0, update_s=50.0) as engine:
            running = asyncio.create_task(engine.generate(request("a", prompt(0, 10), 5)))
            await asyncio.sleep(11.5)  # in the second iteration, which ends at 12
            await engine.suspend()
            suspended = loop.time()
            await engine.load_weights(1)
            updated = loop.time()
            await engine.resume()
            found = await running
            assert found.versions.tolist() == [0, 0, 1, 1, 1]
            return updated - suspended, loop.time() - updated

    update, rest = in_virtual_time(elapsed())
    assert update == pytest.approx(50.0)
    # The prompt and both sampled tokens are computed again: 12 tokens, and 3 iterations sample the rest.
    assert rest == pytest.approx(12.0 + 3.0, abs=0.01)


def test_a_version_pulled_ahead_costs_its_place_alone() -> None:
    async def elapsed() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        async with make_engine(decode_s=1.0, pull_s=30.0, update_s=2.0) as engine:
            running = asyncio.create_task(engine.generate(request("a", count=40)))
            await engine.prefetch(1)
            assert 28 <= (await engine.stats()).decode_tokens <= 32  # generation went on beside it
            await running
            await engine.suspend()
            began = loop.time()
            await engine.load_weights(1)
            ahead = loop.time() - began
            await engine.load_weights(2)
            return ahead, loop.time() - began - ahead

    ahead, whole = in_virtual_time(elapsed())
    assert ahead == pytest.approx(2.0)
    assert whole == pytest.approx(32.0)


async def test_every_turn_has_its_whole_budget_unless_told_otherwise() -> None:
    found = await many(50)
    assert {(len(each.tokens), each.stop) for each in found} == {(60, StopReason.LENGTH)}
    assert not STOPS & set(np.concatenate([each.tokens for each in found]).tolist())
    # Two of the vocabulary's tokens are stop tokens, all the others are equally probable.
    np.testing.assert_allclose(
        np.concatenate([each.logprobs for each in found]), -math.log(VOCABULARY - 2), rtol=1e-6
    )


async def test_lengths_are_geometric_and_logprobs_are_of_the_draws() -> None:
    found = await many(400, end_probability=0.1)
    lengths = np.array([len(each.tokens) for each in found])
    # E[min(L, 60)] of a geometric L is (1 - .9^60) / .1 = 9.98, its deviation about 9.3: five sigma.
    assert abs(lengths.mean() - 9.98) < 5 * 9.3 / math.sqrt(400)
    for each in found:
        ended = each.stop is StopReason.STOP
        assert (int(each.tokens[-1]) == 2) == ended
        np.testing.assert_allclose(each.logprobs[:-1], math.log(0.9 / (VOCABULARY - 2)), rtol=1e-6)
        np.testing.assert_allclose(
            each.logprobs[-1], math.log(0.1 if ended else 0.9 / (VOCABULARY - 2)), rtol=1e-6
        )


async def test_lengths_can_have_a_heavy_tail_around_their_median() -> None:
    found = await many(400, median_tokens=8, tokens_sigma=0.8)
    lengths = np.array([len(each.tokens) for each in found])
    # P(L <= 8) = 1/2; P(L > 24) = P(Z > ln 3 / .8 = 1.373) = 0.085. Five sigma of binomial shares.
    assert abs((lengths <= 8).mean() - 0.5) < 5 * 0.5 / 20
    assert abs((lengths > 24).mean() - 0.085) < 5 * 0.279 / 20


def test_the_hazard_is_of_the_rounded_log_normal() -> None:
    hazard = end_probabilities(settings(median_tokens=4, tokens_sigma=0.5), 12)
    survival = np.concatenate([[1.0], np.cumprod(1 - hazard)])
    assert survival[4] == pytest.approx(0.5)
    # P(X > 8) = P(Z > ln 2 / .5 = 1.38629) = 0.0828286
    assert survival[8] == pytest.approx(0.0828286, abs=1e-6)
    assert end_probabilities(settings(median_tokens=1, tokens_sigma=0.01), 4).tolist()[1:] == [1.0, 1.0, 1.0]


def test_two_distributions_of_lengths_are_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="end_probability and median_tokens"):
        RolloutConfig(engine={"kind": "simulated", "end_probability": 0.1, "median_tokens": 4})


@pytest.mark.slow
async def test_the_service_hosts_it_and_takes_published_versions_only(tmp_path: Path) -> None:
    make_model(0).save_pretrained(tmp_path / "model")
    publish(WeightStore(ObjectStore(str(tmp_path / "weights"))), 1, make_model(1).state_dict().items())
    process = await ServiceProcess.start(
        "engine",
        "tasks.rollout.engines.service",
        {
            "model": str(tmp_path / "model"),
            "engine": {"kind": "simulated", "decode_s": 0.001},
            "weights": {"url": str(tmp_path / "weights")},
            "max_context": MAX_CONTEXT,
            "token": "a secret of the test",
        },
        tmp_path / "engine.log",
    )
    try:
        client = await RpcClient(process.url, token="a secret of the test").connect()
        engine = RemoteEngine(client)
        assert len((await engine.generate(request(count=7))).tokens) == 7
        await engine.suspend()
        with pytest.raises(RpcError, match="version 7 is not published"):
            await engine.load_weights(7)
        await engine.load_weights(1)
        await engine.resume()
        assert set((await engine.generate(request(count=7))).versions.tolist()) == {1}
        await client.close()
    finally:
        await process.stop()
