import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.report import timeline
from tasks.report.run_files import Span


def span(lane, stage, start, end, step=0):
    return Span(lane, stage, step, start, end)


def test_overlapping_work_is_counted_once_and_waiting_not_at_all():
    spans = [
        span("trainer", "get_batch", 0, 4),
        span("trainer", "train_step", 4, 7),
        span("trainer", "checkpoint", 6, 8),
        span("trainer", "checkpoint", 6.5, 7.5),
        span("weights", "publish", 8, 9),
    ]
    assert timeline.busy_shares(spans, 10.0) == {"trainer": pytest.approx(0.4), "weights": pytest.approx(0.1)}
    assert timeline.busy_shares(spans, 0.0) == {}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_busy_seconds_are_those_that_some_span_covers(stretches):
    spans = [span("engine", "generate", start, start + length) for start, length in stretches]
    covered = {second for start, length in stretches for second in range(start, start + length)}
    assert timeline.busy_seconds(spans) == len(covered)


def test_lanes_run_from_the_top_and_unknown_ones_follow():
    spans = [span(lane, "x", 0, 1) for lane in ("mine", "trainer", "control")]
    figure = timeline.timeline(spans)
    assert figure["layout"]["yaxis"]["categoryarray"] == ["mine", "trainer", "control"]
    go.Figure(figure)


def test_a_bar_starts_and_ends_with_its_span_and_tells_stage_step_and_duration():
    figure = timeline.timeline([span("trainer", "train_step", 2.0, 5.0, step=7)])
    (bars,) = figure["data"]
    assert (bars["name"], bars["base"], bars["x"], bars["y"]) == ("train step", [2.0], [3.0], ["trainer"])
    assert bars["customdata"] == [[7, 2.0, 3.0]]


def test_shows_the_last_steps_first_and_the_whole_run_on_demand():
    spans = [span("trainer", "train_step", step, step + 1, step) for step in range(100)]
    layout = timeline.timeline(spans)["layout"]
    start, end = layout["xaxis"]["range"]
    assert start == pytest.approx(100 - timeline.WINDOW_STEPS, abs=0.1)
    assert end == pytest.approx(100, abs=0.1)
    assert layout["meta"]["whole"] == [0, 100]


def test_a_very_long_run_shows_its_last_spans():
    spans = [span("trainer", "train_step", at, at + 1, at) for at in range(timeline.SPANS_SHOWN + 5)]
    (bars,) = timeline.timeline(spans)["data"]
    assert len(bars["x"]) == timeline.SPANS_SHOWN
    assert min(bars["base"]) == 5
