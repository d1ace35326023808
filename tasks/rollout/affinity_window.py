"""What the affinity profile remembers: the last steps' trajectories, and how long an advice held. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from infra.resources import ANYWHERE
from tasks.rollout.affinity_profile import Advice
from tasks.rollout.roofline import DomainWork
from tasks.train.manifests import ManifestEntry


@dataclass(slots=True)
class _Sums:
    trajectories: int = 0
    tokens: int = 0
    decoded: int = 0
    turns: int = 0


class TrajectoryWindow:
    """Trained trajectories of the last `steps` steps, by domain; and what the engines did meanwhile."""

    def __init__(self, steps: int):
        self._steps: deque[dict[str, _Sums]] = deque(maxlen=steps)
        self._engines: deque[tuple[int, int]] = deque(maxlen=steps)  # tokens prefilled and decoded

    def add(self, entries: Iterable[ManifestEntry]) -> None:
        """The batch of a further step."""
        sums: dict[str, _Sums] = {}
        for entry in entries:
            domain = sums.setdefault(entry.domain, _Sums())
            domain.trajectories += 1
            domain.tokens += entry.tokens
            domain.decoded += entry.sampled_tokens
            domain.turns += entry.turns
        self._steps.append(sums)

    def add_engine_work(self, prefilled: int, decoded: int) -> None:
        """What all engines did since it was asked last; prefill without what weight updates made again."""
        self._engines.append((max(prefilled, 0), max(decoded, 0)))

    def works(self) -> list[DomainWork]:
        """Each domain's work of a mean step; nothing of domains that trained nothing in the window."""
        total: dict[str, _Sums] = {}
        for step in self._steps:
            for domain, sums in step.items():
                into = total.setdefault(domain, _Sums())
                into.trajectories += sums.trajectories
                into.tokens += sums.tokens
                into.decoded += sums.decoded
                into.turns += sums.turns
        scale = self._prefill_scale(total.values())
        return [
            DomainWork(
                domain,
                trajectories=sums.trajectories / len(self._steps),
                tokens=sums.tokens / sums.trajectories,
                decoded=sums.decoded / sums.trajectories,
                turns=sums.turns / sums.trajectories,
                prefill_scale=scale,
            )
            for domain, sums in sorted(total.items())
        ]

    def _prefill_scale(self, sums: Iterable[_Sums]) -> float:
        """How often the engines prefilled a token that was not sampled, by their own counters.

        They count what was thrown away too, so their ratio of prefill to decode is compared with that of the
        trained trajectories. It is the same for every domain: engines do not count by domain.
        """
        domains = list(sums)
        written = sum(domain.tokens - domain.decoded for domain in domains)
        sampled = sum(domain.decoded for domain in domains)
        prefilled, decoded = (
            (sum(counts) for counts in zip(*self._engines, strict=True)) if self._engines else (0, 0)
        )
        if not (written and sampled and prefilled and decoded):
            return 1.0
        return (prefilled / decoded) / (written / sampled)


@dataclass(slots=True)
class Hysteresis:
    """Whether an advice is to be followed: it must save `gain`, in `patience` steps in a row."""

    gain: float
    patience: int
    _mapping: dict[str, str] = field(default_factory=dict)
    _held: int = 0

    def accepts(self, advice: Advice, current: Mapping[str, str]) -> bool:
        """The advice of a further step; `current` is the mapping that it would replace."""
        differs = any(current.get(domain, ANYWHERE) != pool for domain, pool in advice.mapping.items())
        if not differs or advice.gain < self.gain:
            self._mapping, self._held = {}, 0
            return False
        self._held = self._held + 1 if advice.mapping == self._mapping else 1
        self._mapping = advice.mapping
        if self._held < self.patience:
            return False
        self._mapping, self._held = {}, 0
        return True
