"""Rewards of a simulation: dedicated workers with a queue, or functions with cold starts and keep-alive."""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from infra.clock import now
from infra.performance.distributions import Distribution, constant
from tasks.environment.config import DomainConfig
from tasks.reward.functions import RewardInput
from tasks.reward.usage import RewardUsage
from tasks.simulation.workload import Workload, key_of
from tasks.trajectory import InfraError, Outcome, Reward

RewardKind = Literal["local", "dedicated", "functions"]
Found = Literal["warm", "cold"]


class Instances:
    """The instances of a function: which call finds a warm one, which starts cold, which waits. Pure.

    A call takes the warm instance that was used last, as services do, so that those in excess run out. An
    instance that has had no call for `keep_alive_s` is gone.
    """

    def __init__(self, keep_alive_s: float, concurrency: int | None = None):
        """`concurrency` is the most instances at a time, None without bound."""
        self._keep_alive_s = keep_alive_s
        self._concurrency = concurrency
        self._idle: deque[float] = deque()  # when each is gone; longest idle first
        self.busy = 0
        self.peak = 0

    def take(self, at: float) -> Found | None:
        """For a call at this time; None when it has to wait until one is given back."""
        while self._idle and self._idle[0] < at:
            self._idle.popleft()
        if self._idle:
            self._idle.pop()
            found: Found = "warm"
        elif self._concurrency is None or self.busy < self._concurrency:
            found = "cold"
        else:
            return None
        self.busy += 1
        self.peak = max(self.peak, self.busy)
        return found

    def give_back(self, at: float) -> None:
        self.busy -= 1
        self._idle.append(at + self._keep_alive_s)


class SimulatedRewards:
    """`tasks.reward.dispatch.RewardWorkers`, as an environment worker needs it.

    `local` and `dedicated` are so many workers that judge one episode at a time, first come first served.
    `functions` are instances of a service: `workers` is then the most at a time.
    """

    def __init__(
        self,
        workload: Workload,
        domains: Mapping[str, DomainConfig],
        *,
        kind: RewardKind = "local",
        workers: int | None = None,
        cold_start_s: Distribution | None = None,
        keep_alive_s: float = 60.0,
    ):
        """`workers` None is without bound."""
        self._domains = domains
        self._workload = workload
        self._kind = kind
        self._workers = workers
        self._instances = Instances(
            keep_alive_s if kind == "functions" else float("inf"), concurrency=workers
        )
        self._cold_start_s = cold_start_s or constant(0)
        self._waiting: deque[asyncio.Future[Found]] = deque()
        self._usage = RewardUsage()

    def usage(self) -> RewardUsage:
        return self._usage

    async def close(self) -> None:
        """There is nothing to end."""

    async def score(self, given: RewardInput, name: str = "") -> Outcome:
        """The outcome that the workload draws for the trajectory of this name, once it has been judged."""
        key = key_of(name)
        domain = self._domains[given.domain]
        low, high = domain.reward_range
        outcome: Outcome = Reward(high if self._workload.succeeds(key) else low)
        seconds = self._workload.reward_s(key)
        if self._workload.domain(key.group).reward_s.is_zero:
            return outcome
        if seconds > domain.reward_limit_s:
            seconds = domain.reward_limit_s
            limit = f"domains.{given.domain}.reward_limit_s is {seconds:g} s"
            outcome = InfraError(f"reward took longer than its limit ({limit})")
        found = self._instances.take(now()) or await self._in_turn()
        try:
            await self._judged(seconds, cold=found == "cold" and self._kind == "functions", name=name)
        finally:
            self._give_back()
        return outcome

    async def _in_turn(self) -> Found:
        place: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            return await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it had just been given one
                self._give_back()
            raise

    def _give_back(self) -> None:
        """The instance is the next call's that waits, or idle."""
        self._instances.give_back(now())
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                found = self._instances.take(now())
                assert found is not None
                place.set_result(found)
                return

    async def _judged(self, seconds: float, *, cold: bool, name: str) -> None:
        start_s = self._workload.cold_start_s(key_of(name), self._cold_start_s) if cold else 0.0
        began = now()
        try:
            await asyncio.sleep(start_s + seconds)
        finally:
            self._count(now() - began, start_s, cold)

    def _count(self, taken: float, start_s: float, cold: bool) -> None:
        usage = self._usage
        if self._kind != "functions":
            workers = self._workers or self._instances.peak
            self._usage = replace(
                usage, workers=workers, calls=usage.calls + 1, busy_seconds=usage.busy_seconds + taken
            )
            return
        self._usage = replace(
            usage,
            function_calls=usage.function_calls + 1,
            function_seconds=usage.function_seconds + taken,
            function_busy_seconds=usage.function_busy_seconds + max(taken - start_s, 0.0),
            activations=usage.activations + cold,
            cold_starts=usage.cold_starts + cold,
            cold_start_seconds=usage.cold_start_seconds + start_s,
            concurrency_peak=self._instances.peak,
        )
