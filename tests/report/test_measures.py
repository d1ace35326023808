from pathlib import Path

import pytest

from tasks.report.html import write_report
from tasks.report.measures import Measures
from tasks.report.plan_section import plan_markdown, plan_section, read_plan, write_plan
from tasks.report.run_files import RunFiles, Span
from tests.report.sample_run import write_sample_run
from tests.report.test_html import own_markup


def row(step, end, seconds, **more):
    return {
        "step": step,
        "time": end,
        "seconds/step": seconds,
        "seconds/train_step": seconds / 2,
        "reward/math/count": 4,
        "episode/math/tokens": 100.0,
        "staleness/histogram": [4],
        "tokens/trained": 90,
        **more,
    }


ROWS = [
    row(0, 100.0, 100.0),
    row(1, 110.0, 10.0),
    row(2, 130.0, 20.0, **{"staleness/histogram": [2, 2], "tokens/wasted/stale": 20}),
]
SPANS = [
    Span("trainer", "train_step", 0, 0.0, 99.0),
    Span("trainer", "train_step", 1, 95.0, 105.0),
    Span("engine", "generate", 2, 110.0, 131.0),
]


def test_the_warm_up_is_left_out():
    measures = Measures.of(ROWS, SPANS, 1)
    assert measures is not None
    assert measures.steps == 2
    assert measures.step_seconds == 15
    assert measures.tokens_per_s == pytest.approx(2 * 400 / 30)
    assert measures.stage_seconds == {"train_step": 7.5}
    assert measures.staleness_mean == pytest.approx(2 / 8)
    assert measures.wasted_share == pytest.approx(20 / 200)
    # From 100 s to 130 s: 5 s of the trainer, 20 s of the engine.
    assert measures.busy == pytest.approx({"engine": 20 / 30, "trainer": 5 / 30})


def test_without_a_step_after_the_warm_up_there_is_nothing():
    assert Measures.of(ROWS[:1], SPANS, 1) is None
    assert Measures.of([], [], 0) is None


PLAN = {
    "cluster": "few",
    "warm_up_steps": 1,
    "campaign_steps": 80,
    "usd": 24.0,
    "prediction": {"usd_per_hour": 72.0, "usd_per_step": 0.3},
    "measures": {
        "steps": 5,
        "step_seconds": 12.0,
        "tokens_per_s": 20.0,
        "stage_seconds": {"train_step": 7.5, "pull": 1.0},
        "busy": {"trainer": 0.5},
        "staleness_mean": 0.0,
        "wasted_share": 0.1,
    },
}


def lines(rows=(), spans=()):
    section = plan_section(PLAN, rows, spans)
    return {line["what"]: tuple(line.values())[1:] for line in section.lines}


def test_predicted_stands_beside_measured():
    found = lines(ROWS, SPANS)
    assert found["seconds a step"] == ("12", "15", "1.25")
    assert found["tokens a second"] == ("20", "26.67", "1.33")
    assert found["mean staleness"] == ("0.000", "0.250", "")
    assert found["wasted tokens"] == ("10.0%", "10.0%", "1.00")
    assert found["seconds of train_step"] == ("7.5", "7.5", "1.00")
    assert found["seconds of pull"] == ("1", "", "")
    assert found["busy: engine"] == ("", "66.7%", "")
    assert "80" not in plan_section(PLAN).summary
    assert "24 USD the campaign" in plan_section(PLAN).summary


def test_before_the_run_only_the_prediction_is_shown():
    assert lines()["seconds a step"] == ("12", "", "")
    assert "| seconds a step | 12 |  |  |" in plan_markdown(PLAN)


def test_the_report_has_the_section_where_the_run_has_a_plan(tmp_path: Path):
    write_sample_run(tmp_path / "without", 3)
    assert "Predicted and measured" not in write_report(tmp_path / "without").read_text()
    files: RunFiles = write_sample_run(tmp_path / "planned", 3)
    write_plan(files.folder, PLAN)
    assert read_plan(files.folder) == PLAN
    page = own_markup(write_report(files.folder).read_text())
    assert "Predicted and measured" in page
    assert "Measured are the run's 2 steps" in page.replace("&#39;", "'")
