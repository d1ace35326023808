"""The environment side of a simulation: the real environment worker, in this process, on simulated parts."""

import asyncio
from typing import Any

from blocks.sample_buffer import SampleBuffer
from tasks.campaign import Campaign
from tasks.environment.cluster import Listener
from tasks.environment.worker import EnvironmentWorker
from tasks.simulation.hosts import MEMBER, SimulatedHosts
from tasks.simulation.renderer import SimulatedRenderer
from tasks.simulation.rewards import SimulatedRewards
from tasks.trajectory import MemberSpec, TrajectoryHeader


class SimulatedEnvironments:
    """`tasks.environment.cluster.EnvironmentCluster`, as a session and its collector need it."""

    name = "the simulated environments"

    def __init__(
        self,
        campaign: Campaign,
        hosts: SimulatedHosts,
        rewards: SimulatedRewards,
        renderer: SimulatedRenderer,
        buffer: SampleBuffer,
        context_limit: int | None = None,
    ):
        """`campaign.environment.concurrent_trajectories` run at a time, the others wait for a place.

        `context_limit` is the most tokens that the model attends to.
        """
        self._campaign = without_sources(campaign)
        self._hosts = hosts
        self._rewards = rewards
        self._renderer = renderer
        self._buffer = buffer
        self._context_limit = context_limit
        self._worker: EnvironmentWorker | None = None
        self._prefix = ""
        self._running: set[asyncio.Task[None]] = set()

    def connect(self, settings: dict[str, Any]) -> None:
        """Name the proxy that members will use: settings of `tasks.environment.worker.run_members`."""
        self._prefix = settings.get("prefix", "")
        self._worker = EnvironmentWorker(
            self._campaign,
            settings["proxy"],
            self._hosts,
            self._rewards,
            self._renderer,
            self._buffer,
            self._context_limit,
        )

    def submit(self, members: list[MemberSpec], listener: Listener) -> None:
        """Run these members; `listener` hears of each one's end, exactly once."""
        loop = asyncio.get_running_loop()
        for member in members:
            task = loop.create_task(self._run(member, listener))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def alive(self) -> None:
        """It is part of this process."""

    async def wait_failed(self) -> str:
        await asyncio.Event().wait()  # it is part of this process
        raise AssertionError

    async def reward_usage(self) -> dict[str, dict[str, float]]:
        """What rewards have taken so far (`RewardUsage`), by worker: there is one."""
        return {"simulated": self._rewards.usage().to_json()}

    async def stop(self) -> None:
        """Ends what still runs; no listener hears of it."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._worker is not None:
            await self._worker.close()

    async def _run(self, member: MemberSpec, listener: Listener) -> None:
        assert self._worker is not None, "connect comes before submit"
        MEMBER.set(member.key)  # of this task and those it starts
        await self._worker.connect()
        await self._hosts.machines.trajectory_begins()
        headers = await self._worker.run([member], _unannounced, self._prefix)
        await self._hosts.machines.trajectory_ends()
        listener(TrajectoryHeader.from_json(headers[0]))


def _unannounced(_: dict[str, Any]) -> None:
    """The control plane hears of an end once it has had the time to."""


def without_sources(campaign: Campaign) -> Campaign:
    """The campaign with simulated environments in the place of its sources, agents' programs among them."""
    domains = {
        name: domain.model_copy(update={"source": "simulated", "options": {}})
        for name, domain in campaign.domains.items()
    }
    return campaign.model_copy(update={"domains": domains})
