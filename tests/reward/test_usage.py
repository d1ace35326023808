"""What dedicated reward workers computed over what they could have, and what functions were used for."""

import asyncio

import pytest

from tasks.environment.config import DomainConfig
from tasks.reward.dispatch import RewardWorkers
from tasks.reward.functions import RewardInput
from tasks.reward.usage import RewardMeter, RewardUsage, usage_metrics, usage_since
from tasks.trajectory import InfraError, Reward


def given(action: str) -> RewardInput:
    return RewardInput("d", 3, "p", (action,), ("o",), (0.0,), "terminated", {})


BUSY = RewardUsage(workers=2, calls=10, busy_seconds=3.0)


def test_utilisation_is_of_all_workers_over_the_stretch():
    """Worker a: 2 processes, 3 s more; b: 1 process, new, 1 s; 3 processes for 10 s."""
    before = {"a": BUSY, "gone": RewardUsage(workers=4, calls=99, busy_seconds=9.0)}
    after = {
        "a": RewardUsage(workers=2, calls=14, busy_seconds=6.0),
        "b": RewardUsage(workers=1, calls=3, busy_seconds=1.0),
    }
    assert usage_metrics(before, after, 10.0) == {
        "reward/workers": 3,
        "reward/calls": 7,
        "reward/busy_seconds": 4.0,
        "reward/utilisation": pytest.approx(4 / 30),
    }


def test_a_worker_that_was_replaced_counts_anew():
    fresh = RewardUsage(workers=2, calls=1, busy_seconds=0.5)
    assert usage_since(BUSY, fresh) == fresh


def test_of_a_function_service_it_says_what_is_billed_and_how_much_of_it_was_of_use():
    after = {
        "a": RewardUsage(
            function_calls=64,
            function_seconds=8.0,
            function_busy_seconds=2.0,
            activations=3,
            cold_starts=2,
            cold_start_seconds=1.5,
            concurrency_peak=2,
        )
    }
    metrics = usage_metrics({}, after, 10.0)
    assert metrics["reward/function_utilisation"] == 0.25
    assert (metrics["reward/cold_starts"], metrics["reward/concurrency_peak"]) == (2, 2)
    assert "reward/utilisation" not in metrics


def test_rewards_that_need_no_worker_have_no_metrics():
    assert usage_metrics({}, {"a": RewardUsage()}, 10.0) == {}


def test_usage_travels_as_json():
    assert RewardUsage.from_json(BUSY.to_json()) == BUSY


async def test_a_child_says_how_long_it_computed_and_a_hanging_one_counts_with_its_limit():
    domain = DomainConfig(source="gem", reward="tests.reward.judgements:obey", reward_limit_s=1.0)
    workers = RewardWorkers({"d": domain}, 1)
    await workers.start()
    try:
        assert workers.usage().workers == 1
        asked = [workers.score(given("doze 0.2")) for _ in range(3)]
        assert all(isinstance(outcome, Reward) for outcome in await asyncio.gather(*asked))
        usage = workers.usage()
        assert usage.calls == 3
        assert usage.busy_seconds >= 0.6  # three times it slept 0.2 s; how much longer is the machine's
        assert isinstance(await workers.score(given("hang")), InfraError)
        assert workers.usage().busy_seconds >= usage.busy_seconds + 1.0
        assert workers.usage().calls == 4
    finally:
        await workers.close()


class Reader:
    def __init__(self):
        self.answers = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self):
        await self.gate.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"a": answer.to_json()}


async def test_a_meter_counts_from_its_restart_and_leaves_out_what_is_late_or_fails():
    reader = Reader()
    reader.answers = [BUSY, RewardUsage(2, 12, 4.0), OSError("lost"), RewardUsage(2, 15, 5.0)]
    meter = RewardMeter(reader)
    await meter.restart()
    assert meter.take() == {}
    meter.begin()
    await asyncio.sleep(0.01)
    assert meter.take()["reward/calls"] == 2
    assert meter.take() == {}
    meter.begin()
    await asyncio.sleep(0.01)
    assert meter.take() == {}  # the reading failed
    reader.gate.clear()
    meter.begin()
    await asyncio.sleep(0.01)
    assert meter.take() == {}  # on its way
    reader.gate.set()
    meter.begin()
    await asyncio.sleep(0.01)
    assert meter.take()["reward/calls"] == 3
    await meter.stop()
