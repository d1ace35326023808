"""The trace that a run leaves, for calibration and for setting a prediction beside it. One with holes is no
ground for either, and says so."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from tasks.report.metrics import Row, number
from tasks.report.run_files import RunFiles, RunFilesDamaged, Span

SHOWN = 5
"""Of the things that are missing, how many an error names."""
LENGTHS = ("tokens", "sampled_tokens", "turns", "seconds")
"""Numbers of a trajectory that a workload is made of."""


class TraceError(ValueError):
    """A trace that is not whole. The message has a line for each file with a hole, and the numbers."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What a run recorded of its steps, of its trajectories and of its time."""

    rows: Sequence[Row]
    ends: Sequence[Mapping[str, Any]]
    spans: Sequence[Span]


def read_trace(folder: str | Path) -> Trace:
    """Read a run's folder. Raises `TraceError` unless every step, each with its time and all of its batch's
    trajectories, is on record; a resumed run's trace is whole too."""
    files = RunFiles(folder)
    try:
        trace = Trace(files.read_metrics(), files.read_ends(), files.read_spans())
    except RunFilesDamaged as error:
        raise TraceError(str(error)) from None
    problems = [
        problem
        for problem in (
            _steps_missing(trace.rows, files.metrics_file),
            _times_missing(trace.rows, files.metrics_file),
            _ends_missing(trace, files.ends_file),
            _lengths_missing(trace.ends, files.ends_file),
            _spans_missing(trace, files.timeline_file),
        )
        if problem
    ]
    if problems:
        raise TraceError("\n".join(["the trace has holes:", *(f"  {problem}" for problem in problems)]))
    return trace


def _steps_missing(rows: Sequence[Row], file: Path) -> str | None:
    if not rows:
        return f"{file}: no finished step"
    steps = [int(row["step"]) for row in rows]
    missing = sorted(set(range(max(steps) + 1)) - set(steps))
    if missing:
        return f"{file}: {_some(missing)} of {max(steps) + 1} steps missing"
    twice = sorted(step for step, count in Counter(steps).items() if count > 1)
    return f"{file}: {_some(twice)} recorded twice" if twice else None


def _times_missing(rows: Sequence[Row], file: Path) -> str | None:
    untimed = [int(row["step"]) for row in rows if not (number(row, "seconds/step") or 0) > 0]
    return f"{file}: no seconds/step for {_some(untimed)} of {len(rows)} steps" if untimed else None


def _ends_missing(trace: Trace, file: Path) -> str | None:
    trained = Counter(int(end["step"]) for end in trace.ends if end.get("fate") == "trained")
    short = {
        int(row["step"]): (trained[int(row["step"])], int(number(row, "trajectories") or 0))
        for row in trace.rows
        if trained[int(row["step"])] != int(number(row, "trajectories") or 0)
    }
    if not short:
        return None
    told = [f"step {step} has {found} of {wanted}" for step, (found, wanted) in list(short.items())[:SHOWN]]
    more = f" and {len(short) - SHOWN} steps more" if len(short) > SHOWN else ""
    return f"{file}: trained trajectories missing: {', '.join(told)}{more}"


def _lengths_missing(ends: Sequence[Mapping[str, Any]], file: Path) -> str | None:
    bad = [
        f"{end.get('key', '?')} ({name} is {end.get(name)!r})"
        for end in ends
        for name in LENGTHS
        if not _is_length(end.get(name))
    ]
    return f"{file}: no number for {_some(bad)} of {len(ends)} trajectories" if bad else None


def _spans_missing(trace: Trace, file: Path) -> str | None:
    trained = {span.step for span in trace.spans if span.stage == "train_step"}
    missing = sorted({int(row["step"]) for row in trace.rows} - trained)
    return f"{file}: no train_step of {_some(missing)} of {len(trace.rows)} steps" if missing else None


def _is_length(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= 0


def _some(things: Sequence[Any]) -> str:
    shown = ", ".join(map(str, things[:SHOWN]))
    return f"{len(things)} ({shown}{' ...' if len(things) > SHOWN else ''})"
