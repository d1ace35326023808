"""A published claim beside what we find, with what our figure rests on."""

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Basis = Literal["published", "inferred", "fitted"]
BASES: tuple[Basis, ...] = ("published", "inferred", "fitted")
Relation = Literal["is", "at least", "at most"]
GOAL = 0.10
"""A ratio that deviates more than this needs its reason in `note`."""


@dataclass(frozen=True, slots=True)
class Given:
    """One input of an experiment and where it is from."""

    what: str
    """The input with its value, as a reader of the table sees it."""
    basis: Basis
    source: str
    """Published: the place. Inferred: the reasoning. Fitted: what it was fitted to."""

    def __str__(self) -> str:
        return f"{self.what} [{self.source}]"


def rests_on(*givens: Given | Iterable[Given]) -> dict[str, list[str]]:
    """Inputs by basis, each once, in the order given. Every basis is there, also an empty one."""
    found: dict[str, list[str]] = {basis: [] for basis in BASES}
    for each in givens:
        for given in [each] if isinstance(each, Given) else each:
            if str(given) not in found[given.basis]:
                found[given.basis].append(str(given))
    return found


@dataclass(frozen=True, slots=True)
class Row:
    claim: str
    condition: str
    published: float
    ours: float
    rests_on: Mapping[str, Sequence[str]]
    note: str = ""
    relation: Relation = "is"
    """What is claimed: the number itself, or that ours is at least or at most the number."""

    @property
    def deviation(self) -> float:
        """Ours over published, less 1. A bound that holds deviates by 0."""
        holds = (self.relation == "at least" and self.ours >= self.published) or (
            self.relation == "at most" and self.ours <= self.published
        )
        return 0.0 if holds else self.ours / self.published - 1

    @property
    def met(self) -> bool:
        return abs(self.deviation) <= GOAL

    def plain(self) -> dict[str, object]:
        """As it lies in reproduce.json."""
        return {**asdict(self), "deviation": self.deviation, "met": self.met}


def extremes(
    claim: str,
    condition: str,
    published: tuple[float, float],
    ours: Mapping[str, float],
    rests_on: Mapping[str, Sequence[str]],
    note: str = "",
) -> list[Row]:
    """Two rows of a claim that is published as a range over several settings without saying which is which:
    the lowest and the highest of `ours` (setting -> figure), which the note lists."""
    listed = ", ".join(f"{setting} {figure:.2f}" for setting, figure in ours.items())
    note = f"ours: {listed}. {note}".strip()
    return [
        Row(f"{claim}, {which}", condition, edge, pick(ours.values()), rests_on, note)
        for which, edge, pick in (("lowest", published[0], min), ("highest", published[1], max))
    ]


def table(rows: Sequence[Row]) -> str:
    """The rows as text, a note once where neighbouring rows share it. What they rest on is in the JSON."""
    claims = [f"{row.claim}: {row.condition}" for row in rows]
    width = min(max((len(claim) for claim in claims), default=0), 76)
    lines = [f"{'claim':<{width}}  {'published':>10}  {'ours':>9}  deviation"]
    said = ""
    for row, claim in zip(rows, claims, strict=True):
        sign = {"is": "", "at least": "≥ ", "at most": "≤ "}[row.relation]
        head, *rest = textwrap.wrap(claim, width) or [""]
        mark = "" if row.met else "  *"
        lines.append(
            f"{head:<{width}}  {sign + _figure(row.published):>10}  {_figure(row.ours):>9}"
            f"  {row.deviation:>+8.1%}{mark}"
        )
        lines += [f"  {line}" for line in rest]
        if row.note != said:
            lines += textwrap.wrap(row.note, 104, initial_indent="    ", subsequent_indent="    ")
        said = row.note
    met = sum(row.met for row in rows)
    lines.append(f"{met} of {len(rows)} within {GOAL:.0%} (* is not)")
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.1f}"


def write(rows: Sequence[Row], path: Path) -> None:
    """JSON: `{"goal": ..., "rows": [...]}`, a row as `Row.plain` has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"goal": GOAL, "rows": [row.plain() for row in rows]}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read(path: Path) -> list[Row]:
    """What `write` wrote."""
    plain = json.loads(path.read_text())["rows"]
    return [Row(**{name: row[name] for name in Row.__dataclass_fields__}) for row in plain]
