import json
import math
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.report.intervals import mean_interval
from tasks.report.run_files import RunFiles, RunFilesDamaged, Span


def test_reads_back_what_was_written(tmp_path):
    files = RunFiles(tmp_path / "run").create()
    assert files.logs.is_dir()
    assert files.tensorboard.is_dir()
    assert (files.read_metrics(), files.read_spans()) == ([], [])
    assert (files.read_evaluation(), files.read_untrained(), files.read_campaign()) == (None, None, None)
    files.write_campaign("name: a\n")
    files.append_metrics({"step": 1, "reward/game/mean": 0.5})
    files.append_metrics({"step": 2, "reward/game/mean": 0.75})
    files.append_span("trainer", "train_step", 1, 0.5, 2.0)
    assert files.read_campaign() == "name: a\n"
    assert files.read_metrics() == [
        {"step": 1, "reward/game/mean": 0.5},
        {"step": 2, "reward/game/mean": 0.75},
    ]
    assert files.read_spans() == [Span("trainer", "train_step", 1, 0.5, 2.0)]
    assert files.read_spans()[0].seconds == 1.5


def test_numbers_of_numpy_are_written_as_json_and_what_is_not_finite_as_null(tmp_path):
    files = RunFiles(tmp_path)
    files.append_metrics(
        {
            "step": np.int64(1),
            "loss": np.float32(0.5),
            "norm": math.inf,
            "gap": np.float64("nan"),
            "staleness/histogram": np.array([3, 1]),
        }
    )
    text = files.metrics_file.read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": 0.5,
        "norm": None,
        "gap": None,
        "staleness/histogram": [3, 1],
    }


def test_refuses_what_json_cannot_hold_and_spans_that_end_before_they_start(tmp_path):
    with pytest.raises(TypeError, match="object"):
        RunFiles(tmp_path).append_metrics({"step": object()})
    with pytest.raises(ValueError, match="ends at 1"):
        RunFiles(tmp_path).append_span("trainer", "update", 1, 2.0, 1.0)


@pytest.mark.parametrize("lost", range(1, 20))
def test_a_line_torn_by_a_kill_is_passed_over_and_then_overwritten(tmp_path, lost):
    files = RunFiles(tmp_path)
    files.append_metrics({"step": 1})
    files.append_metrics({"step": 2, "loss": 0.25})
    whole = files.metrics_file.read_bytes()
    last = len(b'{"step": 2, "loss": 0.25}\n')
    assert lost < last
    files.metrics_file.write_bytes(whole[:-lost])
    assert files.read_metrics() == [{"step": 1}]
    files.append_metrics({"step": 2, "loss": 0.5})
    assert files.read_metrics() == [{"step": 1}, {"step": 2, "loss": 0.5}]


def test_a_file_that_holds_only_a_torn_line_is_empty(tmp_path):
    files = RunFiles(tmp_path)
    files.metrics_file.write_bytes(b'{"st')
    assert files.read_metrics() == []
    files.append_metrics({"step": 1})
    assert files.read_metrics() == [{"step": 1}]


def test_damage_elsewhere_is_an_error_that_names_the_line(tmp_path):
    files = RunFiles(tmp_path)
    files.metrics_file.write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunFilesDamaged, match=r"metrics\.jsonl, line 2"):
        files.read_metrics()
    files.metrics_file.write_bytes(b"7\n")
    with pytest.raises(RunFilesDamaged, match="line 1"):
        files.read_metrics()


def test_a_resumed_run_forgets_the_steps_it_will_run_again_but_not_their_time(tmp_path):
    files = RunFiles(tmp_path)
    for step in (1, 2, 3):
        files.append_metrics({"step": step, "time": 10.0 * step})
        files.append_span("trainer", "train_step", step, 10.0 * step - 5, 10.0 * step)
    files.append_span("engine", "generate", 4, 30.0, 34.0)
    with files.metrics_file.open("ab") as file:
        file.write(b'{"step": 4, "ti')
    assert files.drop_from_step(3) == 34.0
    files.append_metrics({"step": 3, "time": 50.0})
    assert [row["step"] for row in files.read_metrics()] == [1, 2, 3]
    assert files.read_metrics()[-1]["time"] == 50.0
    assert [span.step for span in files.read_spans()] == [1, 2]


def test_ends_of_committed_batches_stay_and_those_of_a_batch_that_was_not_committed_go(tmp_path):
    files = RunFiles(tmp_path)
    assert files.read_ends() == []
    files.drop_ends_from_step(3)
    for step in (1, 2, 3):
        files.append_ends([{"step": step, "key": f"{step}-{number}"} for number in range(2)])
    files.append_ends([])
    with files.ends_file.open("ab") as file:
        file.write(b'{"step": 3, "key": "torn')
    files.drop_ends_from_step(3)
    files.append_ends([{"step": 3, "key": "again"}])
    assert [row["key"] for row in files.read_ends()] == ["1-0", "1-1", "2-0", "2-1", "again"]
    files.drop_from_step(1)  # rows of steps that train again, from batches that were decided already
    assert len(files.read_ends()) == 5


def test_resuming_a_run_that_has_written_nothing_starts_at_zero(tmp_path):
    assert RunFiles(tmp_path).drop_from_step(1) == 0.0


def test_the_evaluation_says_which_domains_differ(tmp_path):
    files = RunFiles(tmp_path)
    never, always, no_one = (mean_interval([x] * 50, (0, 1)) for x in (0, 1, 0))
    written = files.write_evaluation(
        {"game": never, "math": never, "web": never},
        {"game": always, "math": no_one, "web": mean_interval([], (0, 1))},
        temperature=1.0,
    )
    assert files.read_evaluation() == written
    assert written["temperature"] == 1.0
    assert [(row["domain"], row["separated"]) for row in written["rows"]] == [
        ("game", True),
        ("math", False),
        ("web", False),
    ]
    assert written["rows"][0]["trained"] == {
        "mean": 1.0,
        "low": pytest.approx(50 / (50 + 3.841459), abs=1e-6),
        "high": 1.0,
        "episodes": 50,
    }
    assert written["rows"][2]["trained"]["mean"] is None


def test_an_evaluation_may_lack_either_policy_so_far(tmp_path):
    files = RunFiles(tmp_path)
    untrained = {"game": mean_interval([0, 1], (0, 1)), "web": mean_interval([], (0, 1))}
    game, _ = files.write_evaluation(untrained, {})["rows"]
    assert game["trained"] is None
    assert not game["separated"]
    read = files.read_untrained()
    assert read["game"] == untrained["game"]
    assert math.isnan(read["web"].mean)
    assert read["web"].high == 1
    assert files.write_evaluation({}, untrained)["rows"][0]["untrained"] is None
    assert files.read_untrained() is None


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_whenever_a_run_is_killed_each_step_has_one_row_with_its_own_label(data):
    """verl #7933: a checkpoint of step 100, and the first label after it was 402 and not 401."""
    steps, every = 12, data.draw(st.integers(1, 4), "checkpoint every")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = 0
        for killed_before in [*data.draw(st.lists(st.integers(1, steps), max_size=3), "kills"), steps]:
            files = RunFiles(folder)
            began_at = files.drop_from_step(checkpoint)
            for step in range(checkpoint, killed_before):
                files.append_metrics({"step": step, "version": step + 1, "time": began_at + step + 1})
                if (step + 1) % every == 0:
                    checkpoint = step + 1
        rows = RunFiles(folder).read_metrics()
    assert [row["step"] for row in rows] == list(range(steps))
    assert [row["version"] for row in rows] == list(range(1, steps + 1))
