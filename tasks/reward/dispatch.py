"""Rewards, from the side that wants them: in process where that is safe, else by warm reward workers."""

from collections.abc import Mapping

from infra.child_pool import ChildPool
from infra.children import ChildError
from tasks.environment.config import DomainConfig
from tasks.reward.functions import IN_PROCESS, RewardInput, judge
from tasks.trajectory import InfraError, Outcome, outcome_from_json


class RewardWorkers:
    """Judges the episodes of a campaign's domains.

    Requests that wait for a worker travel together. A function that hangs is killed with its worker, which is
    replaced: the number of workers stays the same.
    """

    def __init__(self, domains: Mapping[str, DomainConfig], workers: int):
        self._domains = domains
        functions = sorted({domain.reward for domain in domains.values()} - IN_PROCESS.keys())
        self._pool = (
            ChildPool("tasks.reward.worker", {"functions": functions}, workers) if functions else None
        )

    async def start(self) -> None:
        """Raises `infra.children.ChildDied` when a worker does not come up."""
        if self._pool is not None:
            await self._pool.start()

    @property
    def pids(self) -> list[int]:
        return self._pool.pids if self._pool is not None else []

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    async def score(self, given: RewardInput) -> Outcome:
        """Never raises: a function or worker that fails, hangs or dies is an `InfraError`."""
        domain = self._domains[given.domain]
        if domain.reward in IN_PROCESS:
            return judge(domain.reward, IN_PROCESS[domain.reward], given)
        assert self._pool is not None
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
        try:
            outcome = await self._pool.call("score", [domain.reward, fields], domain.reward_limit_s)
        except ChildError as error:
            limit = f"domains.{given.domain}.reward_limit_s is {domain.reward_limit_s:g} s"
            return InfraError(f"reward {domain.reward}: {type(error).__name__}: {error} ({limit})")
        return outcome_from_json(outcome)
