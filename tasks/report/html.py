"""The report of a run: one HTML file that holds all it shows and loads nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml
from plotly.offline import get_plotlyjs

from tasks.report import figures, timeline
from tasks.report.figures import Figure
from tasks.report.metrics import (
    Row,
    domains,
    mean_staleness,
    number,
    numbers,
    staleness_histogram,
    wasted_share,
)
from tasks.report.run_files import RunFiles, Span, replace_file

FIRST_TRAIN_METRICS = ("loss", "gradient_norm", "grad_norm", "entropy", "importance", "ratio", "kl", "clip")
"""Prefixes of the trainer's numbers that come first, in this order."""


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
        seconds=files.last_time(),
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
    seconds: float,
) -> str:
    """The page. `campaign` is its YAML; `seconds` the run's length."""
    options = yaml.safe_load(campaign) if campaign else None
    options = options if isinstance(options, dict) else {}
    plots = _plots(rows)
    gantt = Plot("timeline", "Stage timeline", timeline.timeline(spans), wide=True) if spans else None
    drawn = [plot for section in plots.values() for plot in section] + ([gantt] if gantt else [])
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("report.html.jinja").render(
        name=str(options.get("name", name)),
        summary=_summary(options, name),
        facts=_facts(rows, options, seconds),
        evaluation=_evaluation(evaluation, options),
        steps=len(rows),
        smoothing=_smoothing_caption(rows),
        plots=plots,
        gantt=gantt,
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
            Plot("wasted", "Wasted tokens by reason", figures.wasted(rows)),
        ],
        "Time": [
            Plot("stages", "Stage times", figures.stage_times(rows), wide=True),
            *(
                Plot(f"throughput-{index}", title, figure)
                for index, (title, figure) in enumerate(figures.throughput(rows))
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


def _summary(options: Mapping[str, Any], name: str) -> list[str]:
    """What the run was, in a few words, from the options that are there."""
    train, model = options.get("train") or {}, options.get("model") or {}
    words = [f"run {name}"] if options.get("name") not in (None, name) else []
    if "mode" in train:
        words.append(f"mode {train['mode']}")
    if "alpha" in train:
        words.append(f"staleness bound α = {train['alpha']}")
    if kind := (train.get("algorithm") or {}).get("kind"):
        words.append(str(kind).upper())
    if "groups" in train and "group_size" in train:
        words.append(f"{train['groups']} groups of {train['group_size']}")
    if "path" in model:
        words.append(Path(model["path"]).name if model["path"] else "a model built for the campaign")
    return words


def _facts(rows: Sequence[Row], options: Mapping[str, Any], seconds: float) -> list[tuple[str, str]]:
    """The run's totals: (label, value)."""
    planned = (options.get("train") or {}).get("steps")
    facts = [
        ("train steps", f"{len(rows)} of {planned}" if planned is not None else str(len(rows))),
        ("wall time", duration(seconds)),
    ]
    if not rows:
        return facts
    facts.append(("trajectories", _big(_total(rows, "trajectories"))))
    facts.append(("trained tokens", _big(_total(rows, "tokens/trained"))))
    facts.append(("sampled tokens", _big(_total(rows, "tokens/sampled"))))
    if (share := wasted_share(rows)) is not None:
        facts.append(("wasted tokens", f"{share:.1%}"))
    histograms = [staleness_histogram(row) for row in rows]
    longest = max(map(len, histograms))
    summed = [sum(h[age] for h in histograms if age < len(h)) for age in range(longest)]
    if (staleness := mean_staleness(summed)) is not None:
        facts.append(("mean staleness", f"{staleness:.2f}"))
    step_seconds = [value for row in rows if (value := number(row, "seconds/step")) is not None]
    if step_seconds:
        facts.append(("seconds a step", f"{sum(step_seconds) / len(step_seconds):.1f}"))
    return facts


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


def _total(rows: Sequence[Row], key: str) -> float:
    return sum(number(row, key) or 0.0 for row in rows)


def _big(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g} {unit}"
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: `42 s`, `3 min 20 s`, `2 h 05 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
