"""The answer to a what-if: every candidate with what it is predicted to do, or why it was turned down."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tasks.simulation.what_if.candidates import Point
from tasks.simulation.what_if.prediction import Objective, Prediction
from tasks.simulation.what_if.search import Limits, Search

THE_ONE = "as configured"
"""Label of a candidate where nothing varies."""
COLUMNS = (
    "candidate",
    "step s",
    "tokens/s",
    "USD/h",
    "USD/step",
    "H20-hours/step",
    "utilisation",
    "staleness",
    "wasted",
    "verdict",
)


@dataclass(frozen=True, slots=True)
class Candidate:
    label: str
    changes: Mapping[str, Any]
    """Options of campaign and cluster file that tell it from the files as they are."""
    prediction: Prediction | None
    problem: str | None
    """Why it was turned down: it cannot run, or a limit is not kept."""
    on_front: bool = False
    best: bool = False

    @property
    def verdict(self) -> str:
        if self.problem:
            return self.problem
        return "best" if self.best else "on the front" if self.on_front else "beaten"


@dataclass(frozen=True, slots=True)
class Answer:
    campaign: str
    cluster: str
    objective: Objective
    limits: Limits
    size: int
    """Candidates of the whole space."""
    candidates: Sequence[Candidate]
    """The best first, then the front by cost, the beaten ones, and those turned down."""

    @classmethod
    def of(cls, search: Search, campaign: str, cluster: str) -> "Answer":
        front, best = search.front(), search.best()
        space = search.space

        def candidate(point: Point) -> Candidate:
            return Candidate(
                space.label(point) or THE_ONE,
                space.changes(point),
                search.predictions.get(point),
                search.rejected.get(point),
                point in front,
                point == best,
            )

        beaten = [
            point for point in search.predictions if point not in search.rejected and point not in front
        ]
        beaten.sort(key=lambda point: search.objective.costs(search.predictions[point])[::-1])
        first = [] if best is None else [best]
        order = dict.fromkeys([*first, *front, *beaten, *search.rejected])
        return cls(
            campaign,
            cluster,
            search.objective,
            search.limits,
            space.size,
            [candidate(point) for point in order],
        )

    @property
    def best(self) -> Candidate | None:
        return next((candidate for candidate in self.candidates if candidate.best), None)

    @property
    def simulated(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.prediction is not None]

    @property
    def rejections(self) -> dict[str, int]:
        """How many candidates were turned down for each reason."""
        counts: dict[str, int] = {}
        for candidate in self.candidates:
            if candidate.problem:
                counts[candidate.problem] = counts.get(candidate.problem, 0) + 1
        return counts

    def plain(self) -> dict[str, Any]:
        """As `answer.json` keeps it."""
        return {
            "campaign": self.campaign,
            "cluster": self.cluster,
            "objective": self.objective.value,
            "limits": asdict(self.limits),
            "size": self.size,
            "candidates": [
                {
                    "label": candidate.label,
                    "changes": dict(candidate.changes),
                    "verdict": candidate.verdict,
                    "on_front": candidate.on_front,
                    "best": candidate.best,
                    "prediction": candidate.prediction.model_dump(mode="json")
                    if candidate.prediction
                    else None,
                }
                for candidate in self.candidates
            ],
        }


def table(candidates: Sequence[Candidate]) -> list[dict[str, str]]:
    """A line a candidate, its numbers as text."""
    return [dict(zip(COLUMNS, _cells(candidate), strict=True)) for candidate in candidates]


def format_table(candidates: Sequence[Candidate]) -> str:
    """The table for a terminal, columns aligned."""
    lines = [COLUMNS, *(tuple(line.values()) for line in table(candidates))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cells(candidate: Candidate) -> tuple[str, ...]:
    found = candidate.prediction
    if found is None:
        return (candidate.label, *[""] * (len(COLUMNS) - 2), candidate.verdict)
    used = ", ".join(f"{pool} {share:.0%}" for pool, share in found.utilisation.items())
    return (
        candidate.label,
        f"{found.step_seconds:.4g}",
        f"{found.tokens_per_s:,.0f}",
        f"{found.usd_per_hour:,.2f}",
        f"{found.usd_per_step:.4g}",
        f"{found.h20_hours_per_step:.4g}",
        used,
        f"{found.staleness_mean:.2f}",
        f"{found.wasted_share:.1%}",
        candidate.verdict,
    )
