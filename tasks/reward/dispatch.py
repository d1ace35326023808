"""Rewards, from the side that wants them: in process where that is safe, by workers, or on a service."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace

from infra.child_pool import ChildPool
from infra.children import ChildError
from tasks.environment.config import DomainConfig
from tasks.reward.config import ServerlessConfig
from tasks.reward.functions import IN_PROCESS, RewardError, RewardInput, judge, resolve
from tasks.reward.reward_queue import ServerlessCounts
from tasks.reward.serverless import ServerlessTraits, traits_of
from tasks.reward.serverless_dispatch import ServerlessRewards
from tasks.reward.usage import RewardUsage
from tasks.trajectory import InfraError, Outcome, outcome_from_json


class RewardWorkers:
    """Judges the episodes of a campaign's domains.

    With a function service, functions declared `@serverless` run there. All others run in warm local
    processes: requests that wait for a worker travel together, and a function that hangs is killed with its
    worker, which is replaced: the number of workers stays the same.
    """

    def __init__(
        self,
        domains: Mapping[str, DomainConfig],
        workers: int,
        *,
        memory_mb: int | None = None,
        serverless: ServerlessConfig | None = None,
    ):
        """`memory_mb` bounds the address space of a reward process, here and on the service."""
        self._domains = domains
        self._workers = workers
        self._memory_mb = memory_mb
        self._serverless = serverless
        self._pool: ChildPool | None = None
        self._remote: ServerlessRewards | None = None
        self._remote_functions: dict[str, ServerlessTraits] = {}

    async def start(self) -> None:
        """Raises `infra.children.ChildDied` when a worker does not come up, and `ServerlessError` when the

        function service cannot be used.
        """
        functions = {domain.reward for domain in self._domains.values()} - IN_PROCESS.keys()
        if self._serverless is not None:
            self._remote_functions = await asyncio.to_thread(declared_serverless, functions)
        local = sorted(functions - self._remote_functions.keys())
        if self._serverless is not None and self._remote_functions:
            self._remote = ServerlessRewards(
                self._serverless, self._remote_functions, process_memory_mb=self._memory_mb
            )
            await self._remote.start()
        if local:
            limits = {} if self._memory_mb is None else {"AS": self._memory_mb << 20}
            self._pool = ChildPool("tasks.reward.worker", {"functions": local}, self._workers, limits=limits)
            await self._pool.start()

    @property
    def pids(self) -> list[int]:
        """Of the local workers."""
        return self._pool.pids if self._pool is not None else []

    @property
    def serverless_counts(self) -> ServerlessCounts | None:
        """What the function service has been asked to do; None where it is not used."""
        return self._remote.counts if self._remote is not None else None

    def usage(self) -> RewardUsage:
        """What has been done so far, here and on the service."""
        usage = RewardUsage()
        if self._pool is not None:
            usage = replace(
                usage,
                workers=self._pool.size,
                calls=self._pool.calls,
                busy_seconds=self._pool.busy_seconds,
            )
        if self._remote is not None:
            counts = self._remote.counts
            usage = replace(
                usage,
                function_calls=counts.asked,
                function_seconds=self._remote.function_seconds,
                function_busy_seconds=counts.busy_seconds,
                activations=counts.activations,
                cold_starts=counts.cold_starts,
                cold_start_seconds=counts.cold_start_seconds,
                lost_activations=counts.lost,
                retries=counts.retries,
                concurrency_peak=counts.concurrency_peak,
            )
        return usage

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        if self._remote is not None:
            await self._remote.close()

    async def score(self, given: RewardInput, name: str = "") -> Outcome:
        """Judge an episode. Never raises: a function or worker that fails, hangs or dies is an `InfraError`.

        `name` is the trajectory's: the service judges a name with one input once, however often it is asked.
        """
        domain = self._domains[given.domain]
        if domain.reward in IN_PROCESS:
            return judge(domain.reward, IN_PROCESS[domain.reward], given)
        fields = [
            given.domain,
            given.seed,
            given.prompt,
            given.actions,
            given.observations,
            given.environment_rewards,
            given.stop,
            given.info,
        ]
        if domain.reward in self._remote_functions:
            assert self._remote is not None
            return await self._remote.score(domain.reward, fields, domain.reward_limit_s, name)
        assert self._pool is not None
        try:
            outcome = await self._pool.call("score", [domain.reward, fields], domain.reward_limit_s)
        except ChildError as error:
            limit = f"domains.{given.domain}.reward_limit_s is {domain.reward_limit_s:g} s"
            return InfraError(f"reward {domain.reward}: {type(error).__name__}: {error} ({limit})")
        return outcome_from_json(outcome)


def declared_serverless(functions: Iterable[str]) -> dict[str, ServerlessTraits]:
    """Those of the functions that are declared `@serverless`. Imports their modules.

    One that is not there is left out: the worker that is asked for it says so.
    """
    declared = {}
    for name in functions:
        try:
            traits = traits_of(resolve(name))
        except RewardError:
            continue
        if traits is not None:
            declared[name] = traits
    return declared
