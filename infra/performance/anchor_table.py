"""Published figures beside predicted ones, as a table."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Anchor:
    """One published figure."""

    group: str
    condition: str
    unit: str
    measured: float
    predicted: float | None
    rests_on: str = "kernel calibration, published fixed costs"
    note: str = ""

    @property
    def deviation(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.measured - 1


def table(rows: Iterable[Anchor]) -> str:
    """Markdown, predicted beside measured."""
    lines = ["| | condition | unit | measured | predicted | deviation | rests on | note |", "|---" * 8 + "|"]
    for row in rows:
        deviation = row.deviation
        lines.append(
            f"| {row.group} | {row.condition} | {row.unit} | {row.measured:.4g} | "
            + ("not modelled" if row.predicted is None else f"{row.predicted:.4g}")
            + " | "
            + ("" if deviation is None else f"{deviation:+.1%}")
            + f" | {row.rests_on} | {row.note} |"
        )
    return "\n".join(lines)


def summary(rows: Iterable[Anchor]) -> str:
    """Markdown: of each group how many rows are predicted, and their median and largest deviation."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        found = groups.setdefault(row.group, [])
        if row.deviation is not None:
            found.append(abs(row.deviation))
    lines = ["| | rows | median | largest |", "|---" * 4 + "|"]
    lines += [
        f"| {group} | {len(found)} | {median(found):.1%} | {max(found):.1%} |"
        for group, found in groups.items()
        if found
    ]
    return "\n".join(lines)
