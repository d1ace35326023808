import plotly.graph_objects as go
import pytest

from tasks.report import figures
from tasks.report.bias import Curve
from tasks.report.run_files import RunFiles
from tests.report.sample_run import write_sample_run

EVERY_FIGURE = (
    lambda rows: figures.learning_curves(rows, over="step"),
    lambda rows: figures.learning_curves(rows, over="time"),
    figures.staleness,
    figures.wasted,
    figures.wasted_of_domains,
    figures.prefilled,
    lambda rows: figures.staleness(rows, "staleness/tokens", "tokens"),
    lambda rows: figures.lines(rows, {"reward/utilisation": "u", "reward/absent": "a"}, "%", 100),
    figures.stage_times,
    figures.outcomes,
    lambda rows: figures.by_domain(rows, "turns", "turns"),
    lambda rows: figures.scalar(rows, "train/loss"),
)


def rows(tmp_path, steps):
    files: RunFiles = write_sample_run(tmp_path, steps)
    return files.read_metrics()


@pytest.mark.parametrize("steps", [0, 1, 12, figures.BARS_UP_TO + 1])
def test_every_figure_is_one_that_plotly_accepts(tmp_path, steps):
    sample = rows(tmp_path, steps)
    for build in EVERY_FIGURE:
        figure = build(sample)
        go.Figure(figure)
        assert bool(figure["data"]) == bool(steps)


def test_learning_curves_show_the_points_and_their_smoothing_against_steps_or_minutes():
    means = [0.2, None, 0.4]
    sample = [
        {"step": step, "time": 60.0 * step, "reward/game/mean": mean} for step, mean in enumerate(means)
    ]
    raw, smoothed = figures.learning_curves(sample, over="step")["data"]
    assert raw["x"] == [0, 1, 2]
    assert raw["y"] == [0.2, None, 0.4]
    # The smallest window is 3 points, so the past weighs 1/2: (0.2 / 4 + 0.4 / 2) / (3 / 4).
    assert smoothed["y"] == [pytest.approx(0.2), None, pytest.approx(1 / 3)]
    assert figures.learning_curves(sample, over="time")["data"][0]["x"] == [0, 1, 2]


def test_evaluations_during_training_are_marked_on_the_curve():
    sample = [
        {"step": 0, "reward/game/mean": 0.1},
        {
            "step": 1,
            "reward/game/mean": 0.2,
            "evaluation/game/mean": 0.5,
            "evaluation/game/low": 0.4,
            "evaluation/game/high": 0.7,
        },
    ]
    marks = figures.learning_curves(sample, over="step")["data"][-1]
    assert (marks["x"], marks["y"]) == ([1], [0.5])
    assert marks["error_y"]["array"] == [pytest.approx(0.2)]
    assert marks["error_y"]["arrayminus"] == [pytest.approx(0.1)]


def test_staleness_is_stacked_by_age_whatever_the_lengths_of_the_histograms():
    sample = [{"step": 0, "staleness/histogram": [4]}, {"step": 1, "staleness/histogram": [1, 2, 1]}]
    traces = figures.staleness(sample)["data"]
    assert [trace["y"] for trace in traces] == [[4, 1], [0, 2], [0, 1]]
    assert [trace["name"] for trace in traces] == ["same version", "1 behind", "2 behind"]


def test_stages_keep_their_colour_and_order_and_unknown_ones_get_another():
    sample = [{"step": 0, "seconds/mine": 1.0, "seconds/train_step": 2.0, "seconds/get_batch": 3.0}]
    traces = figures.stage_times(sample)["data"]
    assert [trace["name"] for trace in traces] == ["get batch", "train step", "mine"]
    assert traces[1]["marker"]["color"] == figures.STAGES["train_step"]


def test_reasons_that_wasted_nothing_are_left_out():
    sample = [{"step": 0, "tokens/wasted/stale": 0, "tokens/wasted/failed": 5}]
    assert [trace["name"] for trace in figures.wasted(sample)["data"]] == ["failed"]


def test_lines_are_scaled_and_named_and_those_without_a_value_left_out():
    sample = [{"step": 0, "reward/latency_p50": 0.25}, {"step": 1, "reward/latency_p50": 0.5}]
    named = {"reward/latency_p50": "median", "reward/latency_p99": "high"}
    (trace,) = figures.lines(sample, named, "milliseconds", 1000)["data"]
    assert (trace["name"], trace["y"]) == ("median", [250, 500])


def test_waste_of_a_domain_has_the_colour_of_its_curve():
    sample = [{"step": 0, "reward/web/mean": 0.1, "reward/game/mean": 0.2, "waste/game/stale": 5}]
    (trace,) = figures.wasted_of_domains(sample)["data"]
    curve = figures.learning_curves(sample, over="step")["data"][1]
    assert (trace["name"], curve["name"]) == ("game", "game")
    assert trace["marker"]["color"] == curve["marker"]["color"]


def test_distributions_are_a_pair_of_curves_a_domain():
    curve = Curve("game", "turns", [1.0, 2.0], [0.5, 1.0], [0.75, 1.0])
    figure = figures.distributions([curve], "turns")
    go.Figure(figure)
    generated, accepted = figure["data"]
    assert (generated["line"]["dash"], accepted["line"]["dash"]) == ("dot", "solid")
    assert accepted["y"] == [0.75, 1.0]
    assert figures.distributions([], "turns")["data"] == []
