"""How much reward workers and the function service were used: what a dedicated worker would be paid for.

RollArt §5.3 moved rewards to a function service because dedicated reward GPUs stood idle 94 % of the time; a
run that says so of its own workers shows whether that would pay. Pure, but for `RewardMeter`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from infra.clock import now

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RewardUsage:
    """What the rewards of one environment worker have taken since it came up. All but two are sums."""

    workers: int = 0  # dedicated processes, at present
    calls: int = 0
    busy_seconds: float = 0.0  # of these processes, by their own clocks
    function_calls: int = 0  # rewards asked of the function service
    function_seconds: float = 0.0  # of activations, cold starts included: the most that is billed
    function_busy_seconds: float = 0.0  # of activations that had rewards to judge
    activations: int = 0
    cold_starts: int = 0
    cold_start_seconds: float = 0.0
    lost_activations: int = 0
    retries: int = 0
    concurrency_peak: int = 0  # most activations at a time, so far

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RewardUsage":
        return cls(**data)


_RESTART_LIMIT_S = 2.0
_OF_DEDICATED = ("workers", "calls", "busy_seconds")
_OF_FUNCTIONS = [field.name for field in fields(RewardUsage) if field.name not in _OF_DEDICATED]
_NOT_SUMS = ("workers", "concurrency_peak")


def usage_since(before: RewardUsage, after: RewardUsage) -> RewardUsage:
    """What came in between. A worker whose counts fell was replaced: all of its counts are new."""
    sums = [field.name for field in fields(RewardUsage) if field.name not in _NOT_SUMS]
    if any(getattr(after, name) < getattr(before, name) for name in sums):
        return after
    grown = {name: getattr(after, name) - getattr(before, name) for name in sums}
    return RewardUsage(workers=after.workers, concurrency_peak=after.concurrency_peak, **grown)


def usage_metrics(
    before: Mapping[str, RewardUsage], after: Mapping[str, RewardUsage], seconds: float
) -> dict[str, float]:
    """Metrics of a stretch of `seconds` over all environment workers, by the names of `tasks.report.metrics`.

    `reward/utilisation` is what dedicated workers computed over what they could have; what is not used at
    all has no metrics.
    """
    parts = [usage_since(before.get(worker, RewardUsage()), usage) for worker, usage in after.items()]
    total = RewardUsage(
        **{field.name: sum(getattr(part, field.name) for part in parts) for field in fields(RewardUsage)}
    )
    metrics: dict[str, float] = {}
    if total.workers and seconds > 0:
        metrics |= {f"reward/{name}": getattr(total, name) for name in _OF_DEDICATED}
        metrics["reward/utilisation"] = total.busy_seconds / (total.workers * seconds)
    if total.concurrency_peak:
        metrics |= {f"reward/{name}": getattr(total, name) for name in _OF_FUNCTIONS}
        if total.function_seconds > 0:
            metrics["reward/function_utilisation"] = total.function_busy_seconds / total.function_seconds
    return metrics


Read = Callable[[], Awaitable[Mapping[str, Mapping[str, Any]]]]
"""Asks every environment worker for its `RewardUsage` as JSON, by the worker's address."""


class RewardMeter:
    """Reads the usage once a step, beside the step's work: a worker that is slow to say costs nothing.

    A reading that has not come back when it is wanted, or failed, is left out: the next stretch is longer.
    """

    def __init__(self, read: Read):
        self._read = read
        self._last: dict[str, RewardUsage] = {}
        self._last_at = now()
        self._reading: asyncio.Task[tuple[float, dict[str, RewardUsage]] | None] | None = None

    async def restart(self) -> None:
        """Count from now on: what was done before, for example in an evaluation, is of no step."""
        try:
            async with asyncio.timeout(_RESTART_LIMIT_S):
                found = await self._ask()
        except TimeoutError:
            found = None
        self._last_at, self._last = (now(), {}) if found is None else found

    def begin(self) -> None:
        """Ask, unless an answer is still on its way."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._ask())

    def take(self) -> dict[str, float]:
        """Metrics of the time between the last two readings; empty when there is no new one."""
        if self._reading is None or not self._reading.done() or self._reading.cancelled():
            return {}
        found, self._reading = self._reading.result(), None
        if found is None:
            return {}
        at, usage = found
        metrics = usage_metrics(self._last, usage, at - self._last_at)
        self._last, self._last_at = usage, at
        return metrics

    async def stop(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _ask(self) -> tuple[float, dict[str, RewardUsage]] | None:
        try:
            answers = await self._read()
        except Exception as error:  # whatever Dask raises: a worker that is lost is reported elsewhere
            logger.warning("the usage of reward workers is not known: %s: %s", type(error).__name__, error)
            return None
        return now(), {worker: RewardUsage.from_json(answer) for worker, answer in answers.items()}
