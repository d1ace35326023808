import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tasks.environment.config import DomainConfig
from tasks.environment.hosts import (
    EnvironmentHostDied,
    EnvironmentHosts,
    EnvironmentRaised,
    EnvironmentTimeout,
)
from tests.infra.test_children import gone

SOURCE = "tests.environment.misbehaving:Obedient"


def domain(options: dict[str, Any] | None = None, **changes: Any) -> DomainConfig:
    fields = {"reset_limit_s": 0.4, "step_limit_s": 0.4, "max_turns": 9, **changes}
    return DomainConfig(source=SOURCE, options=options or {}, **fields)


@asynccontextmanager
async def running(hosts: int = 1, drain_limit_s: float = 30.0) -> AsyncIterator[EnvironmentHosts]:
    domains = {
        "d": domain(),
        "slow": domain(step_limit_s=5.0),
        "hanging": domain({"bad_reset": "hang"}),
        "unmakable": domain({"absent": 1}),
    }
    running = EnvironmentHosts(domains, hosts, drain_limit_s)
    await running.start()
    try:
        yield running
    finally:
        await running.close()


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(300):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not become so")


async def test_an_episode_from_reset_to_its_end():
    async with running() as hosts:
        environment = hosts.environment("d")
        assert await environment.reset(7) == "go 7"
        first = await environment.step("0.5")
        assert (first.observation, first.reward, first.terminated) == ("step 1", 0.5, False)
        assert first.info == {"pid": hosts.pids[0]}
        assert (await environment.step("end")).terminated
        with pytest.raises(EnvironmentRaised, match="over"):
            await environment.step("1")
        environment.close()


async def test_256_environments_that_wait_do_not_wait_for_each_other():
    async with running() as hosts:

        async def play() -> None:
            environment = hosts.environment("slow")
            await environment.reset(1)
            for _ in range(4):
                await environment.step("sleep 0.05")
            environment.close()

        await asyncio.gather(*(play() for _ in range(256)))
        began = time.monotonic()
        await asyncio.gather(*(play() for _ in range(256)))
        assert time.monotonic() - began < 5.0  # one after the other it would be 51 s


async def test_what_an_environment_raises_ends_its_own_episode_only():
    async with running() as hosts:
        bad, good = hosts.environment("d"), hosts.environment("d")
        await bad.reset(1)
        await good.reset(2)
        with pytest.raises(EnvironmentRaised, match="RuntimeError: told to raise"):
            await bad.step("raise")
        exiting = hosts.environment("d")
        await exiting.reset(1)
        with pytest.raises(EnvironmentRaised, match="SystemExit"):
            await exiting.step("exit")
        with pytest.raises(EnvironmentRaised, match="told to raise"):
            await hosts.environment("d").reset(-1)
        assert (await good.step("1")).reward == 1.0
        good.close()


async def test_a_result_of_the_wrong_kind_and_an_unmakable_environment_are_told():
    async with running() as hosts:
        environment = hosts.environment("d")
        await environment.reset(1)
        with pytest.raises(EnvironmentRaised, match="StepResult"):
            await environment.step("junk")
        with pytest.raises(EnvironmentRaised, match="absent"):
            await hosts.environment("unmakable").reset(1)


async def hang_in_step(hosts: EnvironmentHosts, how: str = "hang") -> None:
    environment = hosts.environment("d")
    await environment.reset(1)
    await environment.step(how)


async def hang_in_reset(hosts: EnvironmentHosts) -> None:
    await hosts.environment("hanging").reset(-1)


@pytest.mark.parametrize("hang", [hang_in_step, hang_in_reset])
async def test_a_hang_ends_one_trajectory_and_its_siblings_go_on(
    hang: Callable[[EnvironmentHosts], Awaitable[None]],
):
    async with running() as hosts:
        (old,) = hosts.pids
        siblings = [hosts.environment("d") for _ in range(3)]
        for sibling in siblings:
            await sibling.reset(1)
        with pytest.raises(EnvironmentTimeout, match=r"domains\..*_limit_s"):
            await hang(hosts)
        for sibling in siblings:
            assert (await sibling.step("1")).info["pid"] == old
        fresh = hosts.environment("d")
        await fresh.reset(1)
        assert (await fresh.step("1")).info["pid"] != old
        siblings[0].close()
        await siblings[1].step("end")
        await asyncio.sleep(0.1)
        assert (await siblings[2].step("1")).info["pid"] == old  # held for the last of them
        siblings[2].close()
        assert await gone(old)
        fresh.close()


async def test_a_hung_host_is_killed_after_the_drain_limit():
    async with running(drain_limit_s=0.3) as hosts:
        (old,) = hosts.pids
        sibling = hosts.environment("d")
        await sibling.reset(1)
        with pytest.raises(EnvironmentTimeout):
            await hang_in_step(hosts)
        assert await gone(old)
        with pytest.raises(EnvironmentHostDied):
            await sibling.step("1")


async def test_the_number_of_hosts_is_the_same_after_five_hangs():
    async with running(hosts=2) as hosts:
        first = set(hosts.pids)
        for how in ("hang", "spin", "hang", "spin", "hang"):
            with pytest.raises(EnvironmentTimeout):
                await hang_in_step(hosts, how)
        await until(lambda: len(hosts.pids) == 2)
        assert not first & set(hosts.pids)
        for pid in first:
            assert await gone(pid)


async def test_a_crash_is_an_error_for_the_trajectories_of_that_host_only():
    async with running(hosts=2) as hosts:
        environments = [hosts.environment("d") for _ in range(4)]
        for environment in environments:
            await environment.reset(1)
        pids = [(await environment.step("1")).info["pid"] for environment in environments]
        assert len(set(pids)) == 2
        results = await asyncio.gather(
            environments[0].step("crash"),
            *(environment.step("sleep 0.2") for environment in environments[1:]),
            return_exceptions=True,
        )
        for pid, result in zip(pids, results, strict=True):
            assert isinstance(result, EnvironmentHostDied) == (pid == pids[0])
        await until(lambda: len(hosts.pids) == 2)
        assert pids[0] not in hosts.pids


async def test_an_episode_left_while_it_steps_is_closed_and_one_that_hangs_is_still_found():
    async with running() as hosts:
        (old,) = hosts.pids
        left = hosts.environment("d")
        await left.reset(1)
        stepping = asyncio.ensure_future(left.step("hang"))
        await asyncio.sleep(0.05)
        stepping.cancel()
        left.close()
        assert await gone(old)
        assert len(hosts.pids) <= 1
        await hosts.environment("d").reset(1)


async def test_closing_ends_every_host():
    async with running(hosts=2) as hosts:
        pids = hosts.pids
        with pytest.raises(EnvironmentTimeout):
            await hang_in_step(hosts)
    for pid in pids:
        assert await gone(pid)


async def test_the_seed_decides_the_episode_on_whatever_host():
    config = DomainConfig(source="gymnasium", options={"id": "FrozenLake-v1", "is_slippery": True})
    hosts = EnvironmentHosts({"lake": config}, 2)
    await hosts.start()

    async def play(seed: int) -> list[str]:
        environment = hosts.environment("lake")
        seen = [await environment.reset(seed)]
        for _ in range(20):
            result = await environment.step("right")
            seen.append(result.observation)
            if result.terminated:
                break
        environment.close()
        return seen

    episodes = await asyncio.gather(*(play(seed) for seed in [1, 2, 3] * 8))
    assert all(episodes[index] == episodes[index % 3] for index in range(24))
    assert episodes[0] != episodes[1]
    await hosts.close()
