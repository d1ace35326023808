"""What became of every trajectory that ended: trained, or dropped and why. Pure.

A trajectory that ended well waits with its group until the group is trained or dropped; any other is decided
at its end. So each has one line in a run's `ends.jsonl`, written when its fate is known, and a run that is
broken off and resumed writes none twice.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from tasks.trajectory import InfraError, Reward, Skip, TrajectoryHeader, TrajectoryKey


class Fate(StrEnum):
    TRAINED = "trained"
    CANCELLED = "cancelled"  # redundant: its batch or group had what it needs
    STALE = "stale"  # itself or a member of its group older than the staleness bound
    ZERO_VARIANCE = "zero_variance"  # its group's rewards were all equal, and the group was refilled
    FAILED = "failed"  # no reward: a fault, a reward that could not be told, or a group without members


@dataclass(frozen=True, slots=True)
class End:
    """A trajectory that ended, and what became of it."""

    header: TrajectoryHeader
    fate: Fate

    @property
    def is_cut_short(self) -> bool:
        """Ended by the control plane or by a fault: its length is a lower bound of what it would be."""
        return self.header.stop.is_aborted or self.header.stop.is_failure

    def row(self, step: int) -> dict[str, Any]:
        """Its line in `ends.jsonl`; `step` is that of the batch with which its fate was decided.

        `seconds` are those of generation, environment and reward together; `cut_short` says that turns,
        tokens and seconds are lower bounds. `outcome` is reward, skip or infra_error.
        """
        header = self.header
        kind, reward = _outcome(header)
        return {
            "step": step,
            "key": str(header.key),
            "group": header.key.group,
            "domain": header.domain,
            "fate": self.fate.value,
            "stop": header.stop.value,
            "cut_short": self.is_cut_short,
            "outcome": kind,
            "reward": reward,
            "tokens": header.tokens,
            "sampled_tokens": header.sampled_tokens,
            "turns": header.turns,
            "seconds": header.generate_seconds + header.environment_seconds + header.reward_seconds,
            "initiating_version": header.initiating_version,
            "oldest_version": header.oldest_version,
            "newest_version": header.newest_version,
        }


class Ends:
    """Hears of ends and of decisions over groups; gives each trajectory out once, with its fate."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[TrajectoryKey, TrajectoryHeader]] = {}
        self._decided: list[End] = []

    def over(self, header: TrajectoryHeader, fate: Fate) -> None:
        """It ended, and no decision over its group can change what becomes of it."""
        self._decided.append(End(header, fate))

    def wait(self, header: TrajectoryHeader) -> None:
        """It ended well: what becomes of its group becomes of it."""
        self._waiting.setdefault(header.key.group, {})[header.key] = header

    def decide(self, group: int, fate: Fate, members: Iterable[TrajectoryHeader] | None = None) -> None:
        """A group is trained or dropped. Those that wait and are not of `members` were redundant."""
        chosen = None if members is None else {member.key for member in members}
        for key, header in self._waiting.pop(group, {}).items():
            kept = chosen is None or key in chosen
            self._decided.append(End(header, fate if kept else Fate.CANCELLED))

    def take(self) -> list[End]:
        """What was decided since the last call."""
        decided, self._decided = self._decided, []
        return decided


def end_counts(ends: Collection[End]) -> dict[str, float]:
    """Numbers of a step's ends, by the names of `tasks.report.metrics`: what was wasted, and how rewards did.

    `waste/<domain>/<fate>` are sampled tokens that are not trained. `context/wasted/<fate>` are the tokens
    that these trajectories' engines had to prefill, each counted once; `context/trained` those of the
    trained. Latencies are what an episode waits for its reward, of those that were judged.
    """
    counts: Counter[str] = Counter()
    for end in ends:
        header = end.header
        context = header.tokens - header.sampled_tokens
        if end.fate is Fate.TRAINED:
            counts["context/trained"] += context
            continue
        counts[f"waste/{header.domain}/{end.fate}"] += header.sampled_tokens
        counts[f"context/wasted/{end.fate}"] += context
    numbers: dict[str, float] = dict(sorted(counts.items()))
    waits = [end.header.reward_seconds for end in ends if end.header.turns and not end.is_cut_short]
    if waits:
        middle, high = np.quantile(waits, (0.5, 0.99))
        numbers |= {"reward/latency_p50": float(middle), "reward/latency_p99": float(high)}
    return numbers


def _outcome(header: TrajectoryHeader) -> tuple[str, float | None]:
    match header.outcome:
        case Reward(value):
            return "reward", value
        case Skip():
            return "skip", None
        case InfraError():
            return "infra_error", None
