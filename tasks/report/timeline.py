"""The timeline of a run's stages: lanes against time, idle time as the gaps."""

from collections.abc import Iterable, Sequence
from typing import Any

from tasks.report.figures import CATEGORICAL, STAGES, Figure
from tasks.report.run_files import Span

WAITING = frozenset({"get_batch"})
"""Stages that are not work: the trainer has nothing to do until its batch is there."""
LANES = ("control", "engine", "trainer", "weights", "evaluation")
"""Order of the lanes from the top; others follow."""
SPANS_SHOWN = 6000
"""More are too slow to draw; the last ones are shown."""
WINDOW_STEPS = 6
"""Steps in view at first."""


def busy_seconds(spans: Iterable[Span]) -> float:
    """Seconds covered by at least one span of work."""
    busy, covered_to = 0.0, float("-inf")
    work = [span for span in spans if span.stage not in WAITING]
    for span in sorted(work, key=lambda span: span.start):
        busy += max(span.end - max(span.start, covered_to), 0.0)
        covered_to = max(covered_to, span.end)
    return busy


def by_lane(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Spans of each lane, lanes from the top."""
    lanes: dict[str, list[Span]] = {lane: [] for lane in LANES}
    for span in spans:
        lanes.setdefault(span.lane, []).append(span)
    return {lane: members for lane, members in lanes.items() if members}


def busy_shares(spans: Sequence[Span], seconds: float) -> dict[str, float]:
    """Share of the run's `seconds` in which each lane worked."""
    if seconds <= 0:
        return {}
    return {lane: busy_seconds(members) / seconds for lane, members in by_lane(spans).items()}


def first_window(spans: Sequence[Span]) -> tuple[float, float]:
    """The time of the last few steps of the trainer, or of everything when that is short."""
    trained = [span for span in spans if span.lane == "trainer"] or list(spans)
    steps = sorted({span.step for span in trained})
    shown = set(steps[-WINDOW_STEPS:])
    in_view = [span for span in trained if span.step in shown]
    if len(steps) <= WINDOW_STEPS:
        in_view = list(spans)
    return min(span.start for span in in_view), max(span.end for span in in_view)


def timeline(spans: Sequence[Span]) -> Figure:
    """Lanes against seconds since the run's start, one bar a span, coloured by stage."""
    shown = sorted(spans, key=lambda span: span.start)[-SPANS_SHOWN:]
    lanes = list(by_lane(shown))
    seen = dict.fromkeys(span.stage for span in shown)
    stages = [stage for stage in STAGES if stage in seen] + [stage for stage in seen if stage not in STAGES]
    data = [_bars(stage, index, shown) for index, stage in enumerate(stages)]
    if not shown:
        return {"data": [], "layout": {}}
    start, end = first_window(shown)
    margin = 0.01 * (end - start)
    whole = [min(span.start for span in shown), max(span.end for span in shown)]
    return {
        "data": data,
        "layout": {
            "barmode": "overlay",
            "bargap": 0.3,
            "hovermode": "closest",
            "showlegend": True,
            "xaxis": {
                "title": {"text": "seconds since the run's start"},
                "range": [start - margin, end + margin],
            },
            # Plotly draws a category axis from the bottom.
            "yaxis": {
                "type": "category",
                "categoryorder": "array",
                "categoryarray": lanes[::-1],
                "fixedrange": True,
                "automargin": True,
            },
            "meta": {"whole": whole, "window": [start - margin, end + margin]},
        },
    }


def _bars(stage: str, index: int, spans: Iterable[Span]) -> dict[str, Any]:
    members = [span for span in spans if span.stage == stage]
    colour = STAGES.get(stage, CATEGORICAL[index % len(CATEGORICAL)])
    marker: dict[str, Any] = {"color": colour, "line": {"width": 0}}
    if stage in WAITING:
        marker["pattern"] = {"shape": "/", "fillmode": "replace", "size": 6, "solidity": 0.25}
    return {
        "type": "bar",
        "orientation": "h",
        "name": stage.replace("_", " "),
        "base": [span.start for span in members],
        "x": [span.seconds for span in members],
        "y": [span.lane for span in members],
        "customdata": [[span.step, span.start, span.seconds] for span in members],
        "hovertemplate": (
            "<b>%{fullData.name}</b>, step %{customdata[0]}<br>"
            "%{customdata[2]:.3f} s, from %{customdata[1]:.2f} s<extra></extra>"
        ),
        "marker": marker,
    }
