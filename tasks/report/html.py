"""The report of a run: one HTML file that holds all it shows and loads nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml
from plotly.offline import get_plotlyjs

from tasks.bindings import BindingsFile, BindingsRecord
from tasks.report import figures, timeline
from tasks.report.affinity_table import affinity_section
from tasks.report.bias import EndRow
from tasks.report.bias_section import bias_section
from tasks.report.facts import reward_facts, run_facts, summary
from tasks.report.figures import Figure
from tasks.report.metrics import (
    Row,
    domains,
    numbers,
)
from tasks.report.plan_section import plan_section, read_plan
from tasks.report.run_files import RunFiles, Span, replace_file

FIRST_TRAIN_METRICS = ("loss", "gradient_norm", "grad_norm", "entropy", "importance", "ratio", "kl", "clip")
"""Prefixes of the trainer's numbers that come first, in this order."""


CAPTIONS = {
    "Asynchrony": "Staleness: policy versions between the trained one and the oldest that sampled one of a "
    "trajectory's tokens. The ages of turns and tokens say how much of the trajectories is so old.",
    "Waste": "Sampled tokens that no batch took, and context that engines computed for trajectories that no "
    "batch took, or a second time under new weights.",
    "Time": "Stages that run at the same time stack above the whole step.",
}


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot on the page; `wide` takes the whole row."""

    name: str  # of its element on the page
    title: str
    figure: Figure
    caption: str = ""
    wide: bool = False


def write_report(run_folder: str | Path) -> Path:
    """Write a run's report into its folder and return the file.

    Whatever the run has not produced yet is left out, so it may be called at any time.
    Raises `RunFilesDamaged`.
    """
    files = RunFiles(run_folder)
    rows, spans = files.read_metrics(), files.read_spans()
    campaign = files.read_campaign()
    page = render_report(
        name=files.folder.resolve().name,
        campaign=campaign,
        rows=rows,
        spans=spans,
        evaluation=files.read_evaluation(),
        ends=files.read_ends(),
        seconds=files.last_time(),
        bindings=BindingsFile(files.folder).read(),
        plan=read_plan(files.folder),
    )
    replace_file(files.report_file, page)
    return files.report_file


def render_report(
    *,
    name: str,
    campaign: str | None,
    rows: Sequence[Row],
    spans: Sequence[Span],
    evaluation: Mapping[str, Any] | None,
    ends: Sequence[EndRow],
    seconds: float,
    bindings: BindingsRecord | None = None,
    plan: Mapping[str, Any] | None = None,
) -> str:
    """The page. `campaign` is its YAML; `ends` the lines of `ends.jsonl`; `seconds` the run's length;
    `plan` its `plan.json`."""
    options = yaml.safe_load(campaign) if campaign else None
    options = options if isinstance(options, dict) else {}
    plots = _plots(rows)
    gantt = Plot("timeline", "Stage timeline", timeline.timeline(spans), wide=True) if spans else None
    bias = bias_section(ends)
    lengths = [Plot(*figure) for figure in bias.figures] if bias else []
    drawn = [plot for section in plots.values() for plot in section] + lengths + ([gantt] if gantt else [])
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("report.html.jinja").render(
        name=str(options.get("name", name)),
        summary=summary(options, name),
        facts=run_facts(rows, options, seconds),
        evaluation=_evaluation(evaluation, options),
        steps=len(rows),
        smoothing=_smoothing_caption(rows),
        plots=plots,
        captions=CAPTIONS,
        bias=bias,
        lengths=lengths,
        reward_facts=reward_facts(rows),
        gantt=gantt,
        affinity=affinity_section(bindings) if bindings else None,
        plan=plan_section(plan, rows, spans) if plan else None,
        busy=timeline.busy_shares(spans, seconds),
        spans_left_out=max(len(spans) - timeline.SPANS_SHOWN, 0),
        campaign=campaign,
        figures={plot.name: plot.figure for plot in drawn},
        plotly_js=get_plotlyjs(),
    )


def _plots(rows: Sequence[Row]) -> dict[str, list[Plot]]:
    """Sections with their plots; what has no data is left out."""
    sections = {
        "Learning": [
            Plot("reward-step", "Reward against train steps", figures.learning_curves(rows, over="step")),
            Plot("reward-time", "Reward against time", figures.learning_curves(rows, over="time")),
        ],
        "Asynchrony": [
            Plot("staleness", "Staleness of the trained trajectories", figures.staleness(rows)),
            Plot(
                "token-ages",
                "Age of the trained tokens",
                figures.staleness(rows, "staleness/tokens", "tokens"),
            ),
            Plot(
                "turn-ages", "Age of the trained turns", figures.staleness(rows, "staleness/turns", "turns")
            ),
            Plot(
                "mixed",
                "Trajectories of several versions",
                figures.lines(rows, {"staleness/mixed_share": "share"}, "% of the batch", 100),
            ),
        ],
        "Waste": [
            Plot("wasted", "Wasted tokens by reason", figures.wasted(rows)),
            Plot("wasted-domains", "Wasted tokens by domain", figures.wasted_of_domains(rows)),
            Plot("prefilled", "Context prefilled for nothing, or again", figures.prefilled(rows)),
        ],
        "Time": [
            Plot("stages", "Stage times", figures.stage_times(rows), wide=True),
            *(
                Plot(f"throughput-{index}", title, figure)
                for index, (title, figure) in enumerate(figures.throughput(rows))
            ),
        ],
        "Rewards": [
            Plot(
                "reward-use",
                "Utilisation",
                figures.lines(
                    rows,
                    {
                        "reward/utilisation": "dedicated workers",
                        "reward/function_utilisation": "function service",
                    },
                    "% of their time",
                    100,
                ),
            ),
            Plot(
                "reward-latency",
                "What an episode waits for its reward",
                figures.lines(
                    rows,
                    {"reward/latency_p50": "median", "reward/latency_p99": "99th percentile"},
                    "milliseconds",
                    1000,
                ),
            ),
        ],
        "Training": [
            Plot(f"train-{index}", key.replace("_", " "), figures.scalar(rows, f"train/{key}"))
            for index, key in enumerate(_train_metrics(rows))
        ],
        "Episodes": [
            Plot("turns", "Turns per episode", figures.by_domain(rows, "turns", "turns")),
            Plot("tokens", "Tokens per episode", figures.by_domain(rows, "tokens", "tokens")),
            Plot("outcomes", "Why trajectories stopped", figures.outcomes(rows)),
            Plot(
                "zero-variance",
                "Groups with equal rewards",
                figures.scalar(rows, "groups/zero_variance", "groups"),
            ),
        ],
    }
    drawn = {title: [plot for plot in plots if plot.figure["data"]] for title, plots in sections.items()}
    return {title: plots for title, plots in drawn.items() if plots}


def _train_metrics(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in numbers(row, "train/"))

    def order(name: str) -> int:
        starts = (index for index, first in enumerate(FIRST_TRAIN_METRICS) if name.startswith(first))
        return next(starts, len(FIRST_TRAIN_METRICS))

    return sorted(names, key=order)


def _evaluation(evaluation: Mapping[str, Any] | None, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Rows for the table, with each interval's place on a track from the lowest to the highest reward."""
    if not evaluation or not evaluation.get("rows"):
        return None
    rows = []
    for row in evaluation["rows"]:
        results = [result for result in (row["untrained"], row["trained"]) if result]
        domain = (options.get("domains") or {}).get(row["domain"]) or {}
        lowest, highest = domain.get("reward_range") or (
            min(result["low"] for result in results),
            max(result["high"] for result in results),
        )
        width = (highest - lowest) or 1.0
        tracks = [
            {"policy": "before" if result is row["untrained"] else "after"}
            | {
                key: None if result[key] is None else round(100 * (result[key] - lowest) / width, 2)
                for key in ("low", "mean", "high")
            }
            for result in results
        ]
        rows.append({**row, "tracks": tracks, "range": (lowest, highest), "verdict": _verdict(row)})
    settings = {key: value for key, value in evaluation.items() if key != "rows"}
    return {"rows": rows, "settings": settings}


def _verdict(row: Mapping[str, Any]) -> str:
    """`better` and `worse` only where the intervals are apart."""
    if not row["separated"]:
        return "open" if row["untrained"] and row["trained"] else "missing"
    return "better" if row["trained"]["mean"] > row["untrained"]["mean"] else "worse"


def _smoothing_caption(rows: Sequence[Row]) -> str:
    if len(rows) < 2 or not domains(rows):
        return ""
    return "Thin: mean reward of a step's trajectories. Bold: its exponential moving average."
