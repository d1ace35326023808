"""What a run did, in the numbers that a plan predicts: the same arithmetic for simulated and real runs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from tasks.report.metrics import (
    Row,
    domains,
    mean_staleness,
    number,
    stage_seconds,
    staleness_histogram,
    wasted_share,
)
from tasks.report.run_files import Span
from tasks.report.timeline import busy_shares


@dataclass(frozen=True, slots=True)
class Measures:
    """Means over the steps after the warm-up."""

    steps: int
    step_seconds: float
    tokens_per_s: float
    """Prompt and response tokens of the batches over step time."""
    stage_seconds: Mapping[str, float]
    busy: Mapping[str, float]
    """Share of the time in which a lane of the timeline (engine, trainer ...) works."""
    staleness_mean: float
    wasted_share: float

    @classmethod
    def of(cls, rows: Sequence[Row], spans: Sequence[Span], warm_up_steps: int = 1) -> "Measures | None":
        """None where no step but warm-up is finished."""
        measured = rows[warm_up_steps:]
        if not measured:
            return None
        seconds = [number(row, "seconds/step") or 0.0 for row in measured]
        ends = float(measured[-1].get("time") or 0.0)
        starts = ends - sum(seconds)
        within = [
            Span(span.lane, span.stage, span.step, max(span.start, starts), min(span.end, ends))
            for span in spans
            if span.end > starts and span.start < ends
        ]
        stages = [stage_seconds(row) for row in measured]
        counted = [sum(column) for column in zip(*_padded(measured), strict=True)]
        return cls(
            steps=len(measured),
            step_seconds=fmean(seconds),
            tokens_per_s=sum(map(batch_tokens, measured)) / sum(seconds) if sum(seconds) else 0.0,
            stage_seconds={
                stage: fmean(step.get(stage, 0.0) for step in stages)
                for stage in dict.fromkeys(stage for step in stages for stage in step)
            },
            busy=busy_shares(within, sum(seconds)),
            staleness_mean=mean_staleness(counted) or 0.0,
            wasted_share=wasted_share(measured) or 0.0,
        )

    def plain(self) -> dict[str, Any]:
        """As a file keeps it."""
        return asdict(self)


def batch_tokens(row: Row) -> float:
    """Prompt and response tokens of the step's batch."""
    return sum(
        (number(row, f"episode/{domain}/tokens") or 0.0) * (number(row, f"reward/{domain}/count") or 0.0)
        for domain in domains([row])
    )


def _padded(rows: Sequence[Row]) -> list[list[int]]:
    histograms = [staleness_histogram(row) for row in rows]
    longest = max(map(len, histograms))
    return [counts + [0] * (longest - len(counts)) for counts in histograms]
