import asyncio
from typing import Any

import numpy as np

from blocks.sample_buffer import SampleBuffer
from infra.clock import now
from infra.object_store import ObjectStore
from infra.rpc import RpcConnection, RpcServer
from infra.virtual_time import run_virtual
from tasks.campaign import Campaign
from tasks.simulation.environments import SimulatedEnvironments
from tasks.simulation.hosts import SimulatedHosts
from tasks.simulation.renderer import SimulatedRenderer
from tasks.simulation.rewards import SimulatedRewards
from tasks.simulation.workload import DomainWorkload, Workload
from tasks.trajectory import MemberSpec, Reward, StopReason, TrajectoryHeader, TrajectoryKey
from tasks.trajectory_arrow import from_arrow

WORKLOAD = {
    "prompt_tokens": 70,
    "turns": 3,
    "response_tokens": 5,
    "observation_tokens": 12,
    "reset_s": 30,
    "step_s": 10,
    "reward_s": 7,
    "success": 1,
}
GENERATION_S = 2.0


class AnsweringProxy:
    """In the proxy's place: five tokens after two seconds for whoever asks."""

    def __init__(self) -> None:
        self.finished: list[str] = []
        handlers = {"generate": self.generate, "finish": self.finish}
        self.server = RpcServer(handlers)

    async def generate(self, payload: dict[str, Any], _: RpcConnection) -> dict[str, Any]:
        await asyncio.sleep(GENERATION_S)
        count = min(5, payload["max_new_tokens"])
        return {
            "tokens": np.ones(count, np.int32).tobytes(),
            "logprobs": np.full(count, -1, np.float32).tobytes(),
            "versions": np.full(count, 4, np.int32).tobytes(),
            "stop": "stop",
        }

    async def finish(self, payload: dict[str, Any], _: RpcConnection) -> None:
        self.finished += payload["trajectories"]


def campaign(places: int = 256, **domain: Any) -> Campaign:
    budgets = {"max_turns": 8, "max_turn_tokens": 16, "max_tokens": 200, "reset_limit_s": 100, **domain}
    return Campaign.parse(
        {
            "name": "simulated",
            "domains": {"d": {"source": "gymnasium", "step_limit_s": 60, "reward_limit_s": 60, **budgets}},
            "environment": {"concurrent_trajectories": places},
        }
    )


def spec(member: int) -> MemberSpec:
    return MemberSpec(TrajectoryKey(0, member), "d", 7, 100 + member, 4, 1.0)


class Run:
    """The environments, a proxy, and who listens."""

    def __init__(self, campaign: Campaign, **changes: Any):
        domain = DomainWorkload.model_validate({**WORKLOAD, **changes})
        workload = Workload({"d": domain}, list(campaign.domains), 0)
        self.proxy = AnsweringProxy()
        self.buffer = SampleBuffer(ObjectStore("memory://test-environments"))
        self.buffer.drop(self.buffer.names())
        self.environments = SimulatedEnvironments(
            campaign,
            SimulatedHosts(workload, campaign.domains),
            SimulatedRewards(workload, campaign.domains, kind="dedicated", workers=1),
            SimulatedRenderer(),
            self.buffer,
        )
        self.ended: list[tuple[float, TrajectoryHeader]] = []
        self._all_ended = asyncio.Event()

    async def submit(self, members: int) -> None:
        url = await self.proxy.server.start(host="inproc")
        self.environments.connect({"proxy": {"url": url, "token": None}})
        self.environments.submit([spec(member) for member in range(members)], self._on_end)
        self._wanted = members

    async def over(self) -> list[tuple[float, TrajectoryHeader]]:
        await self._all_ended.wait()
        await self.environments.stop()
        await self.proxy.server.stop()
        return self.ended

    def _on_end(self, header: TrajectoryHeader) -> None:
        self.ended.append((now(), header))
        if len(self.ended) == self._wanted:
            self._all_ended.set()


def test_members_run_side_by_side_and_are_judged_in_turn() -> None:
    async def scenario() -> Run:
        run = Run(campaign())
        await run.submit(3)
        await run.over()
        return run

    run = run_virtual(scenario())
    episode = 30 + 3 * (GENERATION_S + 10)
    assert [at for at, _ in run.ended] == [episode + 7, episode + 14, episode + 21]
    header = run.ended[0][1]
    assert header.stop is StopReason.TERMINATED
    assert header.outcome == Reward(1.0)
    assert (header.turns, header.tokens, header.sampled_tokens) == (3, 70 + 3 * 5 + 2 * 12, 15)
    assert (header.generate_seconds, header.environment_seconds) == (6.0, 60.0)
    assert sorted(run.proxy.finished) == [str(TrajectoryKey(0, member)) for member in range(3)]
    stored = [from_arrow(data) for data in run.buffer.get_many(run.buffer.names())]
    assert {len(trajectory.tokens) for trajectory in stored} == {109}


def test_there_are_so_many_places_as_the_campaign_says() -> None:
    async def scenario() -> list[float]:
        run = Run(campaign(places=1), reward_s=0)
        await run.submit(2)
        return [at for at, _ in await run.over()]

    assert run_virtual(scenario()) == [66, 132]


def test_budgets_of_the_campaign_cut_what_the_workload_would_do() -> None:
    async def scenario(**domain: Any) -> TrajectoryHeader:
        run = Run(campaign(**domain))
        await run.submit(1)
        return (await run.over())[0][1]

    assert run_virtual(scenario(max_turns=2)).stop is StopReason.MAX_TURNS
    assert run_virtual(scenario(max_tokens=90)).stop is StopReason.MAX_TOKENS
    assert run_virtual(scenario(max_turn_tokens=2)).sampled_tokens == 6
    assert run_virtual(scenario(reset_limit_s=20)).stop is StopReason.ENVIRONMENT_TIMEOUT


def test_the_control_plane_aborts_a_simulated_episode() -> None:
    async def scenario() -> list[tuple[float, TrajectoryHeader]]:
        run = Run(campaign())
        await run.submit(1)
        await asyncio.sleep(15)
        names = [str(TrajectoryKey(0, 0))]
        await run.proxy.server.broadcast("abort", {"trajectories": names, "reason": "cancelled"})
        return await run.over()

    [(at, header)] = run_virtual(scenario())
    assert (at, header.stop) == (15, StopReason.CANCELLED)


def test_stopping_ends_what_runs() -> None:
    async def scenario() -> int:
        run = Run(campaign())
        await run.submit(2)
        await asyncio.sleep(40)
        await run.environments.stop()
        await run.proxy.server.stop()
        return len(run.ended)

    assert run_virtual(scenario()) == 0
