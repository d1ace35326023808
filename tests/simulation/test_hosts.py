from typing import Any

import pytest

from infra.clock import now
from infra.virtual_time import run_virtual
from tasks.environment.config import DomainConfig
from tasks.environment.hosts import EnvironmentFault, EnvironmentRaised, EnvironmentTimeout
from tasks.environment.rendering import Dialogue
from tasks.simulation.hosts import MEMBER, SimulatedEnvironment, SimulatedHosts
from tasks.simulation.renderer import SimulatedRenderer
from tasks.simulation.workload import DomainWorkload, Workload
from tasks.trajectory import TrajectoryKey

DOMAINS = {"d": DomainConfig(source="simulated", reset_limit_s=100, step_limit_s=20)}


def hosts(**changes: Any) -> SimulatedHosts:
    domain = DomainWorkload.model_validate(
        {
            "prompt_tokens": 70,
            "response_tokens": 5,
            "turns": 3,
            "observation_tokens": 12,
            "reset_s": 30,
            "step_s": 10,
            "success": 1,
            **changes,
        }
    )
    return SimulatedHosts(Workload({"d": domain}, ["d"], 0), DOMAINS)


def environment(hosts: SimulatedHosts) -> SimulatedEnvironment:
    MEMBER.set(TrajectoryKey(0, 0))
    return hosts.environment("d")


def test_an_episode_takes_its_turns_and_their_time() -> None:
    simulated = hosts()

    async def episode() -> list[Any]:
        world = environment(simulated)
        seen: list[Any] = [await world.reset(7), now()]
        for _ in range(3):
            result = await world.step("1")
            seen.append((result.observation, result.reward, result.terminated, now()))
        return seen

    assert run_virtual(episode()) == [
        "70",
        30.0,
        ("12", 0.0, False, 40.0),
        ("12", 0.0, False, 50.0),
        ("0", 1.0, True, 60.0),
    ]
    assert simulated.busy_seconds == 60


@pytest.mark.parametrize(
    ("changes", "fault", "said", "at"),
    [
        ({"reset_failure": 1}, EnvironmentRaised, "reset failed", 30),
        ({"reset_s": 500}, EnvironmentTimeout, "domains.d.reset_limit_s", 100),
        ({"step_failure": 1}, EnvironmentRaised, "step failed", 40),
        ({"step_s": 25}, EnvironmentTimeout, "domains.d.step_limit_s", 50),
    ],
)
def test_faults_come_as_those_of_real_environments(
    changes: dict[str, Any], fault: type[EnvironmentFault], said: str, at: float
) -> None:
    async def episode() -> None:
        world = environment(hosts(**changes))
        await world.reset(7)
        await world.step("1")

    async def failed() -> float:
        with pytest.raises(fault, match=said):
            await episode()
        return now()

    assert run_virtual(failed()) == at


def test_the_renderer_gives_so_many_ids_as_a_text_says() -> None:
    renderer = SimulatedRenderer()
    assert len(renderer.initial("70")) == 70
    assert len(renderer.initial("100000")) == 100_000
    dialogue = Dialogue("70", observations=["3", "12"])
    followed = renderer.follow(dialogue)
    assert (len(followed.ids), followed.fresh) == (12, False)
    assert renderer.decode(renderer.initial("2")) == "1"
    assert renderer.decode(renderer.initial("0")) == ""
