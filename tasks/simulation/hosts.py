"""Environments of a simulation: their resets and steps take the time that the workload says."""

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar

from tasks.environment.config import DomainConfig
from tasks.environment.hosts import EnvironmentRaised, EnvironmentTimeout
from tasks.environment.sources.base import StepResult
from tasks.simulation.machine import Machines, ManyMachines
from tasks.simulation.workload import Workload
from tasks.trajectory import TrajectoryKey

MEMBER: ContextVar[TrajectoryKey] = ContextVar("member")
"""Which trajectory the running task is of. An environment worker asks for an environment by its domain only,
and a simulated one draws its latencies by the trajectory's name."""


class SimulatedHosts:
    """`tasks.environment.hosts.EnvironmentHosts`, as an environment worker needs it."""

    def __init__(
        self, workload: Workload, domains: Mapping[str, DomainConfig], machines: Machines | None = None
    ):
        """`machines` are what the run is on: without, what is around environments costs no time."""
        self._domains = domains
        self._workload = workload
        self.machines = machines or ManyMachines()
        self.busy_seconds = 0.0
        """Of all resets and steps so far."""

    def environment(self, domain: str) -> "SimulatedEnvironment":
        """Of the trajectory that the running task is of."""
        return SimulatedEnvironment(self, domain, self._domains[domain], self._workload, MEMBER.get())

    async def close(self) -> None:
        """There is nothing to end."""


class SimulatedEnvironment:
    """One episode's environment: `tasks.environment.hosts.HostedEnvironment`, as an episode needs it.

    Prompt and observations are texts that say how many tokens they are (`SimulatedRenderer`).
    """

    def __init__(
        self,
        hosts: SimulatedHosts,
        name: str,
        domain: DomainConfig,
        workload: Workload,
        key: TrajectoryKey,
    ):
        self._hosts = hosts
        self._name = name
        self._domain = domain
        self._workload = workload
        self._key = key
        self._turns = workload.turns(key)
        self._turn = 0

    async def reset(self, seed: int) -> str:
        """Raises an `EnvironmentFault` as the workload draws it, or over `reset_limit_s`."""
        fails = self._workload.reset_fails(self._key)
        await self._take(self._workload.reset_s(self._key), self._domain.reset_limit_s, "reset", fails)
        return str(self._workload.prompt_tokens(self._key.group))

    async def step(self, action: str, last: bool = False, limit_s: float | None = None) -> StepResult:
        """Raises an `EnvironmentFault` as the workload draws it, or over `step_limit_s`.

        `limit_s` replaces the domain's `step_limit_s`.
        """
        turn = self._turn
        fails = self._workload.step_fails(self._key, turn)
        limit_s = limit_s if limit_s is not None else self._domain.step_limit_s
        await self._take(self._workload.step_s(self._key, turn), limit_s, "step", fails)
        self._turn += 1
        over = self._turn >= self._turns
        low, high = self._domain.reward_range
        reward = high if over and self._workload.succeeds(self._key) else low if over or last else 0.0
        observation = "0" if over else str(self._workload.observation_tokens(self._key, turn))
        return StepResult(observation, reward, terminated=over)

    def close(self) -> None:
        """There is nothing to end."""

    async def _take(self, seconds: float, limit_s: float, what: str, fails: bool) -> None:
        taken = min(seconds, limit_s)
        self._hosts.busy_seconds += taken
        await self._hosts.machines.answer_arrives()
        if taken > 0:
            await asyncio.sleep(taken)
        await self._hosts.machines.observation_leaves()
        if seconds > limit_s:
            raise EnvironmentTimeout(
                f"{what} took longer than {limit_s:g} s: see domains.{self._name}.{what}_limit_s"
            )
        if fails:
            raise EnvironmentRaised(f"{what} failed, as the workload has it")
