import asyncio
from typing import Any

import pytest

from infra.clock import now
from infra.performance.distributions import constant
from infra.virtual_time import run_virtual
from tasks.environment.config import DomainConfig
from tasks.reward.functions import RewardInput
from tasks.simulation.rewards import Instances, SimulatedRewards
from tasks.simulation.workload import DomainWorkload, Workload
from tasks.trajectory import InfraError, Outcome, Reward, TrajectoryKey

DOMAINS = {"d": DomainConfig(source="simulated", reward_limit_s=30, reward_range=(-1.0, 2.0))}


def rewards(reward_s: float, **options: Any) -> SimulatedRewards:
    domain = DomainWorkload.model_validate(
        {"prompt_tokens": 5, "response_tokens": 5, "reward_s": reward_s, "success": 1}
    )
    return SimulatedRewards(Workload({"d": domain}, ["d"], 0), DOMAINS, **options)


async def judge(rewards: SimulatedRewards, group: int) -> tuple[float, Outcome]:
    given = RewardInput("d", 0, "5", (), (), (), "terminated", {})
    outcome = await rewards.score(given, str(TrajectoryKey(group, 0)))
    return now(), outcome


async def _all_at_once(rewards: SimulatedRewards, calls: int) -> list[float]:
    answers = await asyncio.gather(*(judge(rewards, group) for group in range(calls)))
    assert {outcome for _, outcome in answers} == {Reward(2.0)}
    return [at for at, _ in answers]


def test_dedicated_workers_judge_one_at_a_time_in_the_order_of_arrival() -> None:
    scorer = rewards(4, kind="dedicated", workers=2)
    assert run_virtual(_all_at_once(scorer, 5)) == [4, 4, 8, 8, 12]
    assert (scorer.usage().workers, scorer.usage().calls, scorer.usage().busy_seconds) == (2, 5, 20)


def test_without_a_bound_nothing_waits() -> None:
    assert run_virtual(_all_at_once(rewards(4), 5)) == [4] * 5


def test_a_reward_that_takes_no_time_needs_no_worker() -> None:
    scorer = rewards(0, kind="dedicated", workers=1)
    assert run_virtual(_all_at_once(scorer, 5)) == [0] * 5
    assert scorer.usage().calls == 0


def test_functions_start_cold_are_kept_warm_and_then_gone() -> None:
    scorer = rewards(2, kind="functions", cold_start_s=constant(10), keep_alive_s=60)

    async def scenario() -> list[float]:
        first = await judge(scorer, 0)
        warm = await judge(scorer, 1)
        await asyncio.sleep(61)
        cold_again = await judge(scorer, 2)
        return [first[0], warm[0], cold_again[0]]

    assert run_virtual(scenario()) == [12, 14, 87]
    usage = scorer.usage()
    assert (usage.function_calls, usage.cold_starts, usage.cold_start_seconds) == (3, 2, 20)
    assert (usage.function_seconds, usage.function_busy_seconds) == (26, 6)
    assert usage.concurrency_peak == 1


def test_functions_have_a_limit_of_concurrency() -> None:
    scorer = rewards(2, kind="functions", workers=3, cold_start_s=constant(1))
    assert run_virtual(_all_at_once(scorer, 7)) == [3, 3, 3, 5, 5, 5, 7]
    assert scorer.usage().concurrency_peak == 3


def test_one_that_gave_up_waiting_leaves_its_place_to_the_next() -> None:
    scorer = rewards(4, kind="dedicated", workers=1)

    async def scenario() -> list[float]:
        calls = [asyncio.create_task(judge(scorer, group)) for group in range(4)]
        await asyncio.sleep(1)
        calls[1].cancel()  # it waits
        calls[0].cancel()  # it is being judged
        ended = await asyncio.gather(*calls, return_exceptions=True)
        return [answer[0] for answer in ended if isinstance(answer, tuple)]

    assert run_virtual(scenario()) == [5, 9]
    assert scorer.usage().busy_seconds == 9


def test_over_its_limit_a_reward_is_a_fault_of_the_machinery() -> None:
    scorer = rewards(31)

    async def scenario() -> tuple[float, Outcome]:
        return await judge(scorer, 0)

    at, outcome = run_virtual(scenario())
    assert at == 30
    assert isinstance(outcome, InfraError)
    assert "domains.d.reward_limit_s" in outcome.reason


def test_the_instance_used_last_is_used_first() -> None:
    instances = Instances(keep_alive_s=10)
    assert [instances.take(0), instances.take(0)] == ["cold", "cold"]
    instances.give_back(1)
    instances.give_back(5)
    assert instances.take(11.5) == "warm"  # the other one ran out at 11
    assert instances.take(11.5) == "cold"
    assert instances.peak == 2


def test_an_instance_beyond_the_bound_is_refused() -> None:
    instances = Instances(keep_alive_s=10, concurrency=1)
    assert instances.take(0) == "cold"
    assert instances.take(0) is None
    instances.give_back(3)
    assert instances.take(3) == "warm"


@pytest.mark.parametrize("kind", ["local", "dedicated"])
def test_workers_have_no_cold_start(kind: Any) -> None:
    assert run_virtual(_all_at_once(rewards(2, kind=kind, cold_start_s=constant(9)), 2)) == [2, 2]
