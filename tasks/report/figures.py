"""The report's plots as plotly.js figures: plain JSON, built from the rows of a run's metrics.

Figures carry no colours of text, grid or background; the page adds these for its light or dark scheme.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tasks.report.bias import Curve
from tasks.report.metrics import (
    Row,
    context_wasted,
    domains,
    histogram,
    number,
    numbers,
    smooth,
    smoothing_weight,
    stage_seconds,
    trajectories_per_second,
    wasted_by_domain,
    wasted_tokens,
)

Figure = dict[str, Any]
Value = float | None

# Of middling lightness, so that each reads on white and on near-black.
CATEGORICAL = ("#3b82c4", "#e08a3c", "#3fa37a", "#b565a7", "#c9525e", "#8d7b5f", "#43a5ae", "#8b929d")
BY_STALENESS = ("#7fc4b0", "#3f9fb5", "#3b78b8", "#6a5aae", "#a04a8c", "#c4515a", "#d9793a")
STAGES = {
    "get_batch": "#a4acb8",
    "generate": "#3fa37a",
    "suspend": "#c9525e",
    "update": "#e08a3c",
    "resume": "#d8b13c",
    "recompute": "#b565a7",
    "train_step": "#3b82c4",
    "publish": "#43a5ae",
    "pull": "#6f9bd1",
    "checkpoint": "#8d7b5f",
    "evaluate": "#7a6cc4",
}
WASTED = {"cancelled": "#d8b13c", "stale": "#c9525e", "failed": "#8d5aa8", "zero_variance": "#8b929d"}
BARS_UP_TO = 120
"""Steps up to which stacks are bars; more are drawn as areas."""

FEW_STEPS = 10
"""Steps up to which each has its own tick."""


def learning_curves(rows: Sequence[Row], *, over: str) -> Figure:
    """Mean reward by domain against `over`, "step" or "time" (minutes): points, and a smoothed line."""
    x = [number(row, over) for row in rows]
    if over == "time":
        x = [None if value is None else value / 60 for value in x]
    data: list[dict[str, Any]] = []
    for domain, colour in _coloured(domains(rows)):
        means = [number(row, f"reward/{domain}/mean") for row in rows]
        points = sum(mean is not None for mean in means)
        if not points:
            continue
        raw = {**_line(domain, x, means, colour, width=1), "legendgroup": domain}
        if points == 1:
            data.append(raw)
        else:
            raw |= {"opacity": 0.5, "showlegend": False, "hoverinfo": "skip", "hovertemplate": None}
            data.append(raw)
            smoothed = smooth(means, smoothing_weight(points))
            curve = _line(domain, x, smoothed, colour, width=2.5)
            hover = "%{customdata:.3f}, smoothed %{y:.3f}"
            data.append({**curve, "customdata": means, "hovertemplate": hover, "legendgroup": domain})
        data += _evaluations(rows, x, domain, colour)
    return _figure(data, "step" if over == "step" else "minutes", "mean reward")


def staleness(rows: Sequence[Row], key: str = "staleness/histogram", unit: str = "trajectories") -> Figure:
    """Trajectories, turns or tokens of each batch by their age in policy versions, stacked."""
    histograms = [histogram(row, key) for row in rows]
    ages = range(max(map(len, histograms), default=0))
    series = {
        ("same version" if age == 0 else f"{age} behind"): (
            [float(counts[age]) if age < len(counts) else 0.0 for counts in histograms],
            BY_STALENESS[min(age, len(BY_STALENESS) - 1)],
        )
        for age in ages
    }
    return _stack(rows, series, unit)


def wasted(rows: Sequence[Row]) -> Figure:
    """Sampled tokens that were not trained, by reason, stacked."""
    return _stack(rows, _series(rows, wasted_tokens, WASTED), "tokens")


def wasted_of_domains(rows: Sequence[Row]) -> Figure:
    """Sampled tokens that were not trained, by domain, stacked; a domain has its colour of the curves."""
    colours = dict(_coloured(domains(rows)))
    return _stack(rows, _series(rows, wasted_by_domain, colours), "tokens")


def prefilled(rows: Sequence[Row]) -> Figure:
    """Context tokens that engines computed for nothing or again, stacked."""
    return _stack(rows, _series(rows, context_wasted, {**WASTED, "recomputed": CATEGORICAL[0]}), "tokens")


def lines(rows: Sequence[Row], named: Mapping[str, str], unit: str, scale: float = 1.0) -> Figure:
    """Several numbers a step, `named` by metric, each times `scale`; what no row has is left out."""
    x = [number(row, "step") for row in rows]
    data = []
    for (key, name), colour in zip(named.items(), CATEGORICAL, strict=False):
        values = [None if (value := number(row, key)) is None else scale * value for row in rows]
        if any(value is not None for value in values):
            data.append(_line(name, x, values, colour))
    figure = _figure(data, "step", unit)
    figure["layout"]["yaxis"]["rangemode"] = "tozero"
    return figure


def distributions(curves: Sequence[Curve], unit: str) -> Figure:
    """Cumulative shares of trajectories over their length: generated dotted, accepted drawn through."""
    data: list[dict[str, Any]] = []
    by_domain = {curve.domain: curve for curve in curves}
    for domain, colour in _coloured(by_domain):
        curve = by_domain[domain]
        pair = (("generated", curve.generated, "dot"), ("accepted", curve.accepted, "solid"))
        for name, shares, dash in pair:
            line = _line(f"{domain}, {name}", list(curve.lengths), list(shares), colour)
            line["line"] |= {"shape": "hv", "dash": dash}
            data.append({**line, "hovertemplate": "%{y:.1%}", "legendgroup": domain})
    figure = _figure(data, unit, "share of trajectories")
    figure["layout"]["xaxis"] = {"title": {"text": unit}, "rangemode": "tozero"}
    figure["layout"]["yaxis"] |= {"range": [0, 1.02], "tickformat": ".0%"}
    return figure


def stage_times(rows: Sequence[Row]) -> Figure:
    """Seconds of each stage, stacked, beside the whole step's as a line: stages may run at the same time."""
    figure = _stack(rows, _series(rows, stage_seconds, STAGES), "seconds")
    whole = [number(row, "seconds/step") for row in rows]
    if any(value is not None for value in whole):
        line = _line("whole step", [number(row, "step") for row in rows], whole, None, width=1.5)
        figure["data"].append(line)
    return figure


def outcomes(rows: Sequence[Row]) -> Figure:
    """Trajectories by the reason they stopped, stacked."""
    return _stack(rows, _series(rows, lambda row: numbers(row, "outcomes/"), {}), "trajectories")


def by_domain(rows: Sequence[Row], name: str, unit: str) -> Figure:
    """`episode/<domain>/<name>`, a line a domain."""
    x = [number(row, "step") for row in rows]
    data = []
    for domain, colour in _coloured(domains(rows)):
        values = [number(row, f"episode/{domain}/{name}") for row in rows]
        if any(value is not None for value in values):
            data.append(_line(domain, x, values, colour))
    return _figure(data, "step", unit)


def scalar(rows: Sequence[Row], read: str | Callable[[Row], Value], unit: str = "") -> Figure:
    """One number a step; empty when no row has it."""
    values = [number(row, read) if isinstance(read, str) else read(row) for row in rows]
    if all(value is None for value in values):
        return _figure([], "step", unit)
    line = _line("", [number(row, "step") for row in rows], values, CATEGORICAL[0])
    return _figure([{**line, "showlegend": False}], "step", unit)


def throughput(rows: Sequence[Row]) -> list[tuple[str, Figure]]:
    return [
        ("Trajectories per second", scalar(rows, trajectories_per_second)),
        ("Tokens sampled per second", scalar(rows, "rollout/tokens_per_second")),
    ]


def _evaluations(rows: Sequence[Row], x: list[Value], domain: str, colour: str) -> list[dict[str, Any]]:
    """Evaluations during training as diamonds with their intervals."""
    key = f"evaluation/{domain}/"
    points = [
        (at, mean, number(row, key + "low"), number(row, key + "high"))
        for at, row in zip(x, rows, strict=True)
        if (mean := number(row, key + "mean")) is not None
    ]
    if not points:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"{domain}, held out",
            "x": [at for at, *_ in points],
            "y": [mean for _, mean, _, _ in points],
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [0 if high is None else high - mean for _, mean, _, high in points],
                "arrayminus": [0 if low is None else mean - low for _, mean, low, _ in points],
                "thickness": 1.5,
                "width": 3,
            },
            "marker": {"symbol": "diamond", "size": 9, "color": colour},
            "legendgroup": domain,
        }
    ]


def _series(
    rows: Sequence[Row], read: Callable[[Row], Mapping[str, float]], colours: Mapping[str, str]
) -> dict[str, tuple[list[float], str]]:
    """Values by name, with the name's own colour where it has one; names in the colours' order first."""
    values = [read(row) for row in rows]
    seen = dict.fromkeys(name for row in values for name in row)
    order = [name for name in colours if name in seen] + [name for name in seen if name not in colours]
    palette = dict(_coloured(name for name in order if name not in colours)) | dict(colours)
    return {
        name: (column, palette[name])
        for name in order
        if any(column := [row.get(name, 0.0) for row in values])
    }


def _stack(rows: Sequence[Row], series: Mapping[str, tuple[list[float], str]], unit: str) -> Figure:
    x = [number(row, "step") for row in rows]
    data: list[dict[str, Any]] = []
    for name, (values, colour) in series.items():
        trace = {"name": name.replace("_", " "), "x": x, "y": values, "hovertemplate": "%{y:,.4~g}"}
        if len(rows) <= BARS_UP_TO:
            data.append({**trace, "type": "bar", "marker": {"color": colour, "line": {"width": 0}}})
        else:
            area = {"type": "scatter", "mode": "lines", "stackgroup": "all", "fillcolor": colour}
            data.append({**trace, **area, "line": {"color": colour, "width": 0}})
    figure = _figure(data, "step", unit)
    figure["layout"] |= {"barmode": "stack", "bargap": 0.12 if len(rows) <= 40 else 0}
    figure["layout"]["yaxis"]["rangemode"] = "tozero"
    return figure


def _line(
    name: str, x: list[Value], y: list[Value], colour: str | None, width: float = 1.8
) -> dict[str, Any]:
    """A curve; without a colour of its own it takes the page's ink."""
    points = sum(value is not None for value in y)
    own = {} if colour is None else {"color": colour}
    return {
        "type": "scatter",
        "mode": "lines" if points > 1 else "markers",
        "name": name,
        "x": x,
        "y": y,
        "line": {"width": width, **own},
        "marker": {"size": 8, **own},
        "hovertemplate": "%{y:,.4~g}",
    }


def _figure(data: list[dict[str, Any]], x_title: str, y_title: str) -> Figure:
    places = {place for trace in data for place in trace["x"] if place is not None}
    x_axis: dict[str, Any] = {"title": {"text": x_title}}
    if x_title == "minutes":
        x_axis["rangemode"] = "nonnegative"
    else:
        x_axis |= {"tickformat": ",d"} | ({"dtick": 1} if len(places) <= FEW_STEPS else {})
        if len(places) == 1:
            x_axis["range"] = [min(places) - 0.9, min(places) + 0.9]
    return {
        "data": data,
        "layout": {
            "hovermode": "x unified",
            "showlegend": any(trace.get("showlegend", True) for trace in data),
            "xaxis": x_axis,
            "yaxis": {"title": {"text": y_title}},
        },
    }


def _coloured(names: Iterable[str]) -> list[tuple[str, str]]:
    return [(name, CATEGORICAL[index % len(CATEGORICAL)]) for index, name in enumerate(names)]
