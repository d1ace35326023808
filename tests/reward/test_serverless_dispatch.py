"""Rewards through Lithops' real localhost back end: processes, pickles and storage as on any service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from tasks.campaign import Campaign, CampaignError
from tasks.environment.config import DomainConfig
from tasks.reward import config as reward_config
from tasks.reward.config import RewardConfig, ServerlessConfig
from tasks.reward.dispatch import RewardWorkers
from tasks.reward.functions import RewardInput
from tasks.reward.lithops_service import ServerlessError, lithops_config
from tasks.reward.serverless import ServerlessTraits
from tasks.reward.serverless_dispatch import ServerlessRewards
from tasks.trajectory import InfraError, Outcome, Reward, Skip

pytest.importorskip("lithops")

OBEY = "tests.reward.judgements:obey_remotely"
TRAITS = ServerlessTraits(limit_s=2.0, retries=2)


@asynccontextmanager
async def service(process_memory_mb: int | None = None, **options: Any) -> AsyncIterator[ServerlessRewards]:
    config = ServerlessConfig(backend="localhost", **{"retry_pause_s": 0.05, **options})
    rewards = ServerlessRewards(config, {OBEY: TRAITS}, process_memory_mb=process_memory_mb)
    await rewards.start()
    try:
        yield rewards
    finally:
        await rewards.close()


async def judged(rewards: ServerlessRewards, action: str, name: str = "", limit_s: float = 60.0) -> Outcome:
    fields = ["d", 3, "p", [action], ["o", "q"], [0.0], "terminated", {"key": [1, "x"]}]
    return await rewards.score(OBEY, fields, limit_s, name)


def activation_processes() -> list[psutil.Process]:
    """Processes in which Lithops runs a function for this one, each with children of its own."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "localhost-runner" in " ".join(process.cmdline())
    ]


@pytest.mark.slow
async def test_32_rewards_travel_together_and_a_warm_activation_beats_a_cold_one():
    loop = asyncio.get_running_loop()
    async with service(warm_workers=0) as rewards:
        seconds = []
        for turn in range(4):
            began = loop.time()
            outcomes = await asyncio.gather(*(judged(rewards, str(n), f"{turn}-{n}") for n in range(32)))
            seconds.append(loop.time() - began)
            assert outcomes == [Reward(float(number)) for number in range(32)]
        counts = rewards.counts
        assert (counts.batches, counts.activations, counts.cold_starts) == (4, 1, 1)
        assert (counts.lost, counts.retries, counts.duplicates) == (0, 0, 0)
        assert counts.cold_start_seconds > 0
        assert counts.busy_seconds > 0
        assert min(seconds[1:]) < seconds[0] / 2
    assert counts.activation_seconds >= counts.busy_seconds
    assert activation_processes() == []


@pytest.mark.slow
async def test_a_reward_that_fails_or_hangs_takes_no_sibling_along():
    actions = ["1", "hang", "skip", "raise", "crash", "nan", "input", "2"]
    async with service(processes=2) as rewards:
        outcomes = await asyncio.gather(*(judged(rewards, action) for action in actions))
        assert outcomes[0] == Reward(1.0)
        assert outcomes[2] == Skip("no gold answer")
        assert outcomes[6:] == [Reward(1.0), Reward(2.0)]
        for number, reason in ((1, "limit_s"), (3, "told to raise"), (4, "ChildDied"), (5, "returned nan")):
            assert isinstance(outcomes[number], InfraError)
            assert reason in outcomes[number].reason
        assert rewards.counts.retries == 0  # they are faults of the reward, which has none
        assert await judged(rewards, "3") == Reward(3.0)


@pytest.mark.slow
async def test_what_was_asked_twice_is_judged_once():
    async with service() as rewards:
        first, second = await asyncio.gather(judged(rewards, "time", "t1"), judged(rewards, "time", "t1"))
        assert isinstance(first, Reward)
        assert first == second == await judged(rewards, "time", "t1")
        assert rewards.counts.repeated == 2
        assert rewards.counts.asked == 1
        assert await judged(rewards, "time", "t2") != first


@pytest.mark.slow
async def test_a_killed_activation_is_replaced_and_its_rewards_are_judged_all_the_same():
    async with service(warm_workers=0, activations=1) as rewards:
        assert await judged(rewards, "1") == Reward(1.0)
        (runner, function) = sorted(activation_processes(), key=lambda process: process.create_time())
        asked = asyncio.gather(*(judged(rewards, "doze 0.3", f"t{number}") for number in range(4)))
        for _ in range(500):
            if rewards.counts.batches == 2:
                break
            await asyncio.sleep(0.01)
        function.kill()
        assert await asked == [Reward(1.0)] * 4
        assert rewards.counts.lost == 1
        assert rewards.counts.activations == 2
        assert 1 <= rewards.counts.retries <= 4
        assert not runner.is_running() or runner.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
async def test_activations_that_end_with_their_batch_need_no_rest():
    async with service(idle_s=0) as rewards:
        assert rewards.counts.activations == 0
        assert await judged(rewards, "1") == Reward(1.0)
        assert await judged(rewards, "2") == Reward(2.0)
        assert rewards.counts.activations == 2
        assert rewards.counts.lost == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"config": {"localhost": {"runtime": "/absent/python"}}}, "cannot be invoked"),
        ({"process_memory_mb": 24}, "tasks.reward.worker"),
    ],
)
async def test_a_service_that_is_down_is_an_infra_error_after_the_retries(options, reason):
    async with service(warm_workers=0, retries=1, **options) as rewards:
        outcome = await judged(rewards, "1")
        assert isinstance(outcome, InfraError)
        assert reason in outcome.reason
        assert "after 2 tries" in outcome.reason
        assert (rewards.counts.retries, rewards.counts.given_up) == (1, 1)


@pytest.mark.slow
async def test_closing_ends_what_is_open_and_deletes_what_is_stored():
    async with service(max_waiting=2) as rewards:
        assert await judged(rewards, "1") == Reward(1.0)
        asked = [asyncio.create_task(judged(rewards, "hang", str(number))) for number in range(5)]
        await asyncio.sleep(0.1)
        assert rewards.counts.asked == 3  # the other three wait outside
        await rewards.close()
        for outcome in await asyncio.gather(*asked):
            assert isinstance(outcome, InfraError)
            assert "closed" in outcome.reason
        assert isinstance(await judged(rewards, "2"), InfraError)
        assert rewards._service is not None
        assert rewards._service.list_keys(f"{rewards._root}/") == []


@pytest.mark.slow
async def test_declared_functions_go_to_the_service_and_others_to_local_workers():
    domains = {
        "far": DomainConfig(source="gem", reward=OBEY),
        "near": DomainConfig(source="gem", reward="tests.reward.judgements:obey"),
        "absent": DomainConfig(source="gem", reward="tests.reward.judgements:absent"),
        "own": DomainConfig(source="gem"),
    }
    workers = RewardWorkers(domains, 1, serverless=ServerlessConfig(backend="localhost"))
    await workers.start()
    try:
        outcomes = await asyncio.gather(
            *(
                workers.score(RewardInput(domain, 3, "p", ("2",), ("o",), (0.5,), "terminated", {}), "t")
                for domain in domains
            )
        )
        assert [outcomes[0], outcomes[1], outcomes[3]] == [Reward(2.0), Reward(2.0), Reward(0.5)]
        assert isinstance(outcomes[2], InfraError)
        assert workers.serverless_counts is not None
        assert workers.serverless_counts.asked == 1
    finally:
        await workers.close()


async def test_without_a_service_declared_functions_run_on_local_workers():
    workers = RewardWorkers({"d": DomainConfig(source="gem", reward=OBEY)}, 1, memory_mb=2048)
    await workers.start()
    try:
        given = RewardInput("d", 3, "p", ("2",), ("o",), (0.5,), "terminated", {})
        assert await workers.score(given) == Reward(2.0)
        assert workers.serverless_counts is None
    finally:
        await workers.close()


def campaign(serverless: dict[str, Any]) -> Campaign:
    return Campaign.parse(
        {"name": "c", "domains": {"d": {"source": "gem"}}, "reward": {"serverless": serverless}}
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "aliyun"}, "no compute back end 'aliyun'"),
        ({"backend": "aws_lambda", "storage": "localhost"}, "name an object store"),
        ({"backend": "localhost", "batch": 3}, "there is no such option"),
    ],
)
def test_a_service_that_cannot_be_is_one_error_before_anything_starts(options, said):
    with pytest.raises(CampaignError, match=r"reward\.serverless") as error:
        campaign(options)
    assert said in str(error.value)


def test_a_missing_lithops_is_one_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(reward_config, "find_spec", lambda name: None)
    with pytest.raises(CampaignError, match=r"reward\.serverless.*tutti\[serverless\]"):
        campaign({"backend": "localhost"})


def test_what_a_service_needs_and_was_not_given_is_named():
    config = ServerlessConfig(backend="openwhisk", storage="minio")
    with pytest.raises(ServerlessError, match=r"openwhisk.*'openwhisk' section.*reward\.serverless\.config"):
        lithops_config(config, {})
    absent = ServerlessConfig(backend="localhost", config_file="/absent/lithops.yaml")
    with pytest.raises(ServerlessError, match=r"reward\.serverless\.config_file.*/absent/lithops\.yaml"):
        lithops_config(absent, {})
    with pytest.raises(ServerlessError, match="endpoint"):
        lithops_config(config, {"openwhisk": {"namespace": "n"}})


def test_the_campaigns_sections_come_over_the_blocks(tmp_path):
    file = tmp_path / "lithops.yaml"
    file.write_text("lithops: {log_level: ERROR}\nlocalhost: {worker_processes: 9, runtime: python3}\n")
    config = ServerlessConfig(
        backend="localhost", config_file=str(file), config={"localhost": {"runtime": "b"}}, activations=3
    )
    merged = lithops_config(config, {"localhost": {"runtime": "a"}, "aws": {"region": "r"}})
    assert merged["localhost"]["runtime"] == "b"
    assert merged["localhost"]["worker_processes"] == 3
    assert merged["aws"] == {"region": "r"}
    assert merged["lithops"]["log_level"] == "ERROR"
    assert (merged["lithops"]["backend"], merged["lithops"]["storage"]) == ("localhost", "localhost")


def test_the_whole_configuration_survives_being_saved_with_the_run():
    config = RewardConfig.model_validate({"serverless": {"backend": "k8s", "config": {"k8s": {"docker": 1}}}})
    assert RewardConfig.model_validate(config.model_dump(mode="json")) == config
