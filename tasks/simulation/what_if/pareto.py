"""Which of several candidates no other beats: the Pareto front. Pure."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Nowhere worse and somewhere better; smaller is better."""
    pairs = list(zip(one, other, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def front(costs: Mapping[Name, Sequence[float]]) -> list[Name]:
    """Those that nothing dominates, in order of their first cost. Of equal ones all are kept."""
    kept = [name for name, own in costs.items() if not any(dominates(other, own) for other in costs.values())]
    return sorted(kept, key=lambda name: tuple(costs[name]))
