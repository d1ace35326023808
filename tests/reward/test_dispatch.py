import asyncio
from collections.abc import AsyncIterator

import pytest

from tasks.environment.config import DomainConfig
from tasks.reward.dispatch import RewardWorkers
from tasks.reward.functions import RewardInput
from tasks.trajectory import InfraError, Reward, Skip
from tests.infra.test_children import gone

DOMAINS = {
    "d": DomainConfig(source="gem", reward="tests.reward.judgements:obey", reward_limit_s=0.3),
    "absent": DomainConfig(source="gem", reward="tests.reward.judgements:absent"),
    "own": DomainConfig(source="gem"),
}


def given(action: str, domain: str = "d", rewards: tuple[float, ...] = (0.0,)) -> RewardInput:
    return RewardInput(domain, 3, "p", (action,), ("o", "q"), rewards, "terminated", {"key": [1, "x"]})


@pytest.fixture
async def workers() -> AsyncIterator[RewardWorkers]:
    running = RewardWorkers(DOMAINS, 2)
    await running.start()
    yield running
    await running.close()


@pytest.mark.parametrize(
    ("action", "outcome"),
    [("0.25", Reward(0.25)), ("true", Reward(1.0)), ("skip", Skip("no gold answer")), ("input", Reward(1.0))],
)
async def test_a_judgement_comes_back_whole(workers, action, outcome):
    assert await workers.score(given(action)) == outcome


async def test_functions_that_use_signal_alarm_work(workers):
    assert await workers.score(given("alarm")) == Reward(1.0)


@pytest.mark.parametrize("action", ["none", "nan", "inf", "text", "raise", "crash"])
async def test_a_fault_is_never_a_reward(workers, action):
    outcome = await workers.score(given(action))
    assert isinstance(outcome, InfraError)
    assert await workers.score(given("1")) == Reward(1.0)


async def test_five_hangs_leave_as_many_workers_and_their_neighbours_judged(workers):
    first = workers.pids
    actions = ["hang", "1", "hang", "2", "hang", "3", "hang", "4", "hang", "5"]
    outcomes = await asyncio.gather(*(workers.score(given(action)) for action in actions))
    assert outcomes[1::2] == [Reward(float(number)) for number in range(1, 6)]
    for outcome in outcomes[::2]:
        assert isinstance(outcome, InfraError)
        assert "domains.d.reward_limit_s" in outcome.reason
    for _ in range(200):
        if len(workers.pids) == 2:
            break
        await asyncio.sleep(0.02)
    assert len(workers.pids) == 2
    assert not set(first) & set(workers.pids)
    for pid in first:
        assert await gone(pid)


async def test_many_at_once_are_answered_in_order(workers):
    outcomes = await asyncio.gather(*(workers.score(given(str(number))) for number in range(500)))
    assert outcomes == [Reward(float(number)) for number in range(500)]


async def test_an_absent_function_is_a_fault_that_names_it(workers):
    outcome = await workers.score(given("1", "absent"))
    assert isinstance(outcome, InfraError)
    assert "absent" in outcome.reason


async def test_functions_of_this_project_need_no_process():
    workers = RewardWorkers({"own": DOMAINS["own"]}, 2)
    await workers.start()
    assert workers.pids == []
    assert await workers.score(given("x", "own", (0.5, 0.25))) == Reward(0.75)
    await workers.close()
