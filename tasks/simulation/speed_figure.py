"""How long simulating takes, and how that grows: points as measured, and their plot. Pure.

`tests/bench/simulator_speed.py` measures them and leaves them in runs/simulator_speed.json.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.report.figures import CATEGORICAL, Figure


@dataclass(frozen=True, slots=True)
class SpeedPoint:
    """A simulation of the production workload, and what it took, a train step."""

    gpus: int
    trajectories: int
    """In a batch."""
    steps: int
    """That were simulated."""
    turns: int
    """A step: of everything that ended, trained or not."""
    cpu_seconds: float
    """Of one core, a step."""
    wall_seconds: float
    """The same by the clock: more where other work shares the core."""
    virtual_seconds: float
    """That a step would take."""
    events: int
    """Callbacks of the event loop, a step."""
    memory_mb: float
    """At most, of the process."""


def write_points(points: Sequence[SpeedPoint], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"points": [asdict(point) for point in points]}, indent=2) + "\n")


def read_points(path: Path) -> list[SpeedPoint]:
    return [SpeedPoint(**point) for point in json.loads(path.read_text())["points"]]


def growth(points: Sequence[SpeedPoint]) -> Figure:
    """Seconds of a core a step: over GPUs with the smallest batch, over trajectories with the most GPUs.

    Both axes are logarithmic, so time that grows in proportion is a line at 45 degrees: the dotted one, drawn
    from the smallest batch.
    """
    most, fewest = max(point.gpus for point in points), min(point.trajectories for point in points)
    by_gpus = sorted((each for each in points if each.trajectories == fewest), key=lambda each: each.gpus)
    by_batch = sorted((each for each in points if each.gpus == most), key=lambda each: each.trajectories)
    first, last = by_batch[0], by_batch[-1]
    proportional = first.cpu_seconds * last.trajectories / first.trajectories
    return {
        "data": [
            _line(f"{most:,} GPUs, by trajectories", by_batch, CATEGORICAL[0], by_gpus=False),
            _line(f"{fewest:,} trajectories, by GPUs", by_gpus, CATEGORICAL[1], by_gpus=True),
            {
                "type": "scatter",
                "mode": "lines",
                "name": "in proportion to trajectories",
                "x": [first.trajectories, last.trajectories],
                "y": [first.cpu_seconds, proportional],
                "line": {"color": CATEGORICAL[7], "dash": "dot"},
                "hoverinfo": "skip",
            },
        ],
        "layout": {
            "hovermode": "closest",
            "showlegend": True,
            "xaxis": {"title": {"text": "trajectories in a batch, or GPUs"}, "type": "log"},
            "yaxis": {"title": {"text": "seconds of a core, a step"}, "type": "log"},
        },
    }


def _line(name: str, points: Sequence[SpeedPoint], colour: str, by_gpus: bool) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [point.gpus if by_gpus else point.trajectories for point in points],
        "y": [point.cpu_seconds for point in points],
        "text": [
            f"{point.gpus:,} GPUs, {point.trajectories:,} trajectories: {point.turns:,} turns and "
            f"{point.events:,} events a step"
            for point in points
        ],
        "hovertemplate": "%{text}<br>%{y:.1f} s<extra></extra>",
        "line": {"color": colour},
    }
