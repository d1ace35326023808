"""What a campaign's plan predicted, beside what its run measured."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.report.measures import Measures
from tasks.report.metrics import Row
from tasks.report.run_files import Span, replace_file

PLAN_FILE = "plan.json"
HEADER = ("what", "predicted", "measured", "measured / predicted")


@dataclass(frozen=True, slots=True)
class PlanSection:
    summary: str
    lines: Sequence[dict[str, str]]
    """By `HEADER`."""


def write_plan(folder: Path, plan: Mapping[str, Any]) -> Path:
    """Keep a `tasks.simulation.what_if.plan.Plan`, as plain data, with the run."""
    path = folder / PLAN_FILE
    replace_file(path, json.dumps(plan, indent=2, allow_nan=False))
    return path


def read_plan(folder: Path) -> dict[str, Any] | None:
    """None where the run has none."""
    path = folder / PLAN_FILE
    if not path.exists():
        return None
    plan: dict[str, Any] = json.loads(path.read_text())
    return plan


def plan_section(
    plan: Mapping[str, Any], rows: Sequence[Row] = (), spans: Sequence[Span] = ()
) -> PlanSection:
    """Predicted beside measured, both without the same number of warm-up steps."""
    warm_up_steps = int(plan["warm_up_steps"])
    measured = Measures.of(rows, spans, warm_up_steps)
    predicted = plan["measures"]
    lines = [
        dict(zip(HEADER, (what, *_cells(expected, found, form)), strict=True))
        for what, expected, found, form in _pairs(predicted, measured.plain() if measured else {})
    ]
    prediction = plan["prediction"]
    summary = (
        f"Simulated before the start on cluster {plan['cluster']}: {predicted['steps']} steps after "
        f"{warm_up_steps} of warm-up, {prediction['usd_per_hour']:.2f} USD an hour, "
        f"{prediction['usd_per_step']:.3g} USD a step, {plan['usd']:.4g} USD the campaign."
    )
    if measured:
        summary += f" Measured are the run's {measured.steps} steps after its warm-up."
    return PlanSection(summary, lines)


def plan_markdown(plan: Mapping[str, Any], rows: Sequence[Row] = (), spans: Sequence[Span] = ()) -> str:
    """The section as an artifact."""
    section = plan_section(plan, rows, spans)
    table = [list(HEADER), ["---"] * len(HEADER), *(list(line.values()) for line in section.lines)]
    return f"{section.summary}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in table) + "\n"


def _pairs(
    predicted: Mapping[str, Any], measured: Mapping[str, Any]
) -> Iterator[tuple[str, float | None, float | None, str]]:
    """Name, predicted and measured value, format: totals first, then stages and lanes."""
    for key, name, form in (
        ("step_seconds", "seconds a step", ".4g"),
        ("tokens_per_s", "tokens a second", ",.4g"),
        ("staleness_mean", "mean staleness", ".3f"),
        ("wasted_share", "wasted tokens", ".1%"),
    ):
        yield name, predicted.get(key), measured.get(key), form
    for group, title, form in (("stage_seconds", "seconds of", ".4g"), ("busy", "busy:", ".1%")):
        ours, theirs = predicted.get(group) or {}, measured.get(group) or {}
        for name in dict.fromkeys([*ours, *theirs]):
            yield f"{title} {name}", ours.get(name), theirs.get(name), form


def _cells(predicted: float | None, measured: float | None, form: str) -> tuple[str, str, str]:
    ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else ""
    return (
        "" if predicted is None else format(predicted, form),
        "" if measured is None else format(measured, form),
        ratio,
    )
