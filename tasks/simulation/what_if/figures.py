"""Plots of a what-if as plotly.js figures, coloured by the page that shows them (tasks.report.figures)."""

from collections.abc import Sequence
from typing import Any

from tasks.report.figures import CATEGORICAL, STAGES, Figure
from tasks.simulation.what_if.answer import Answer, Candidate
from tasks.simulation.what_if.prediction import Objective, Prediction

BEATEN, FRONT, BEST, OVER = CATEGORICAL[7], CATEGORICAL[0], CATEGORICAL[1], CATEGORICAL[4]
LABELLED = 12
"""Points up to which each has its name beside it."""


def pareto(answer: Answer) -> Figure:
    """Cost against speed: every simulated candidate, with the front drawn through."""
    throughput = answer.objective is Objective.THROUGHPUT
    front = sorted(
        (each for each in answer.simulated if each.on_front), key=lambda each: _place(each, throughput)[0]
    )
    named = {
        "beaten": ([each for each in answer.simulated if each.verdict == "beaten"], BEATEN, "circle"),
        "over a limit": ([each for each in answer.simulated if each.problem], OVER, "x"),
        "Pareto front": (front, FRONT, "circle"),
        "best": ([each for each in answer.simulated if each.best], BEST, "diamond"),
    }
    few = len(answer.simulated) <= LABELLED
    data = []
    for name, (candidates, colour, symbol) in named.items():
        if candidates:
            data.append(_points(name, candidates, colour, symbol, throughput, name == "best" or few))
    cost = "USD a million tokens" if throughput else "USD a step"
    speed = "tokens a second" if throughput else "seconds a step"
    return {
        "data": data,
        "layout": {
            "hovermode": "closest",
            "showlegend": True,
            "xaxis": {"title": {"text": cost}, "rangemode": "tozero", "showgrid": True},
            "yaxis": {"title": {"text": speed}, "rangemode": "tozero"},
        },
    }


def stages(candidates: Sequence[Candidate]) -> Figure:
    """Mean seconds of each stage by candidate. Stages that overlap stand beside each other."""
    found = [(each.label, each.prediction) for each in candidates if each.prediction]
    seen = dict.fromkeys(stage for _, prediction in found for stage in prediction.stage_seconds)
    order = [stage for stage in STAGES if stage in seen] + [stage for stage in seen if stage not in STAGES]
    return _bars(
        [label for label, _ in found],
        {
            stage.replace("_", " "): (
                [prediction.stage_seconds.get(stage, 0.0) for _, prediction in found],
                STAGES.get(stage, CATEGORICAL[7]),
            )
            for stage in order
        },
        "seconds",
    )


def utilisation(candidates: Sequence[Candidate]) -> Figure:
    """Share of its time in which each pool works, by candidate."""
    found = [(each.label, each.prediction) for each in candidates if each.prediction]
    pools = dict.fromkeys(pool for _, prediction in found for pool in prediction.utilisation)
    return _bars(
        [label for label, _ in found],
        {
            pool: (
                [100 * prediction.utilisation.get(pool, 0.0) for _, prediction in found],
                CATEGORICAL[index % len(CATEGORICAL)],
            )
            for index, pool in enumerate(pools)
        },
        "% of the time",
    )


def staleness(prediction: Prediction) -> Figure:
    """Trajectories of the batches by their staleness."""
    ages = [str(age) for age in range(len(prediction.staleness))]
    bar = {"type": "bar", "x": ages, "y": list(prediction.staleness), "marker": {"color": CATEGORICAL[2]}}
    return {
        "data": [{**bar, "name": "trajectories", "showlegend": False}],
        "layout": {
            "xaxis": {"title": {"text": "versions behind"}, "type": "category"},
            "yaxis": {"title": {"text": "trajectories"}, "rangemode": "tozero"},
        },
    }


def _place(candidate: Candidate, throughput: bool) -> tuple[float, float]:
    prediction = candidate.prediction
    assert prediction is not None
    if throughput:
        return prediction.usd_per_million_tokens, prediction.tokens_per_s
    return prediction.usd_per_step, prediction.step_seconds


def _points(
    name: str, candidates: Sequence[Candidate], colour: str, symbol: str, throughput: bool, labelled: bool
) -> dict[str, Any]:
    places = [_place(each, throughput) for each in candidates]
    joined = name == "Pareto front" and len(places) > 1
    mode = "+".join(["markers", *(["lines"] if joined else []), *(["text"] if labelled else [])])
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": [x for x, _ in places],
        "y": [y for _, y in places],
        "text": [each.label for each in candidates],
        "textposition": "top right",
        "textfont": {"size": 10},
        "line": {"color": colour, "width": 1.5},
        "marker": {"color": colour, "symbol": symbol, "size": 12 if name == "best" else 8},
        "hovertemplate": "%{text}<br>%{x:,.4~g} | %{y:,.4~g}<extra>%{fullData.name}</extra>",
    }


def _bars(labels: Sequence[str], series: dict[str, tuple[list[float], str]], unit: str) -> Figure:
    return {
        "data": [
            {
                "type": "bar",
                "name": name,
                "x": list(labels),
                "y": values,
                "marker": {"color": colour, "line": {"width": 0}},
                "hovertemplate": "%{y:,.4~g}",
            }
            for name, (values, colour) in series.items()
        ],
        "layout": {
            "barmode": "group",
            "hovermode": "x unified",
            "showlegend": True,
            "xaxis": {"type": "category"},
            "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        },
    }
