"""Which domain each group of a batch belongs to, and which ready groups make a batch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tasks.trajectory import TrajectoryHeader


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A group whose members are all there."""

    group: int
    domain: str
    members: tuple[TrajectoryHeader, ...]
    oldest_version: int = field(init=False)
    """That sampled a token of any member; 0 of a group without members."""

    def __post_init__(self) -> None:
        # Kept, since whoever looks for what is too old asks every group that waits.
        oldest = min((member.oldest_version for member in self.members), default=0)
        object.__setattr__(self, "oldest_version", oldest)


class DomainQuota:
    """A fixed sequence of domains, one a group, that follows the weights as closely as whole numbers can.

    Batch n holds exactly the groups of slots [n x groups, (n + 1) x groups), so the mix of domains does not
    drift towards those whose trajectories are quick.
    """

    def __init__(self, weights: Mapping[str, float], groups_per_batch: int):
        total = sum(weights.values())
        self._shares = {domain: weight / total for domain, weight in weights.items()}
        self._groups = groups_per_batch
        self._slots: list[str] = []
        self._counts: Counter[str] = Counter()
        self._through: tuple[int, Counter[str]] = (0, Counter())  # what was asked for last: it is asked for
        self._of_batch: tuple[int, Counter[str]] = (-1, Counter())  # again with every trajectory that ends

    def through(self, slots: int) -> Counter[str]:
        """Groups of each domain among the first `slots` slots."""
        if self._through[0] != slots:
            self._extend(slots)
            self._through = (slots, Counter(self._slots[:slots]))
        return self._through[1].copy()

    def of_batch(self, step: int) -> Counter[str]:
        """Groups of each domain in the batch of `step`."""
        if self._of_batch[0] != step:
            end = (step + 1) * self._groups
            self._extend(end)
            self._of_batch = (step, Counter(self._slots[end - self._groups : end]))
        return self._of_batch[1].copy()

    def _extend(self, slots: int) -> None:
        while len(self._slots) < slots:
            position = len(self._slots) + 1
            domain = max(self._shares, key=lambda name: self._shares[name] * position - self._counts[name])
            self._slots.append(domain)
            self._counts[domain] += 1


def choose(ready: Sequence[ReadyGroup], quota: Mapping[str, int]) -> list[ReadyGroup] | None:
    """The groups of the next batch, or None while a domain lacks some.

    Older groups go first, so that fewer grow stale in the queue; the batch itself is in order of group, so
    that it does not depend on which trajectory happened to end first.
    """
    by_domain: dict[str, list[ReadyGroup]] = {domain: [] for domain in quota}
    for group in ready:
        if group.domain in by_domain:
            by_domain[group.domain].append(group)
    if any(len(by_domain[domain]) < wanted for domain, wanted in quota.items()):
        return None
    chosen: list[ReadyGroup] = []
    for domain, wanted in quota.items():
        candidates = sorted(by_domain[domain], key=lambda group: (group.oldest_version, group.group))
        chosen += candidates[:wanted]
    return sorted(chosen, key=lambda group: group.group)
