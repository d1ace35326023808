import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tasks.report.tensorboard import TensorBoardLog


def read(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    accumulator.Reload()
    return accumulator


def test_scalars_and_the_staleness_histogram_are_read_back(tmp_path):
    with TensorBoardLog(tmp_path, started_at=1000.0) as log:
        log.write({"step": 1, "time": 2.5, "train/loss": 0.5, "staleness/histogram": [3, 0, 2]})
        log.write({"step": 2, "time": 5.0, "train/loss": 0.25, "train/gradient_norm": None, "note": "text"})
    events = read(tmp_path)
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(e.step, e.wall_time, e.value) for e in events.Scalars("train/loss")] == [
        (1, 1002.5, 0.5),
        (2, 1005.0, 0.25),
    ]
    (event,) = events.Histograms("staleness")
    histogram = event.histogram_value
    assert (histogram.min, histogram.max, histogram.num) == (0, 2, 5)
    assert (histogram.sum, histogram.sum_squares) == (4, 8)
    assert list(histogram.bucket_limit) == [0.5, 1.5, 2.5]
    assert list(histogram.bucket) == [3, 0, 2]


def test_ages_of_tokens_and_turns_and_what_rewards_took_are_read_back(tmp_path):
    with TensorBoardLog(tmp_path) as log:
        log.write({"step": 1, "staleness/tokens": [7, 1], "staleness/turns": [2], "reward/utilisation": 0.5})
    events = read(tmp_path)
    assert events.Tags()["scalars"] == ["reward/utilisation"]
    assert sorted(events.Tags()["histograms"]) == ["staleness_of_tokens", "staleness_of_turns"]
    (event,) = events.Histograms("staleness_of_tokens")
    assert list(event.histogram_value.bucket) == [7, 1]


def test_a_step_is_on_disk_before_the_log_is_closed(tmp_path):
    log = TensorBoardLog(tmp_path)
    log.write({"step": 1, "train/loss": 0.5})
    assert [event.value for event in read(tmp_path).Scalars("train/loss")] == [0.5]
    log.close()


def test_a_resumed_run_hides_the_steps_it_runs_again(tmp_path, monkeypatch):
    with TensorBoardLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write({"step": step, "train/loss": float(step)})
    first = next(tmp_path.iterdir())
    # Files of a run are read in the order of their names, which hold the second of their making.
    first.rename(tmp_path / "events.out.tfevents.0000000001.first")
    with TensorBoardLog(tmp_path, resumed_step=2) as log:
        log.write({"step": 2, "train/loss": 20.0})
    values = [(event.step, event.value) for event in read(tmp_path).Scalars("train/loss")]
    assert values == [(1, pytest.approx(1.0)), (2, pytest.approx(20.0))]


def test_needs_neither_torch_nor_tensorflow():
    script = (
        "import sys, tasks.report.tensorboard; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'tensorflow')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
