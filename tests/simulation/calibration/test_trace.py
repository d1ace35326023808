import json
from pathlib import Path
from typing import Any

import pytest

from tasks.report.run_files import RunFiles
from tasks.simulation.calibration.trace import TraceError, read_trace
from tasks.simulation.what_if.predict import predict
from tests.simulation.small import small_campaign, small_cluster


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of 4 steps leaves."""
    folder = tmp_path_factory.mktemp("trace") / "run"
    predict(small_campaign(), small_cluster(), steps=3, warm_up=1, folder=folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    files = RunFiles(whole)
    for file in (files.metrics_file, files.ends_file, files.timeline_file):
        (tmp_path / file.name).write_text(file.read_text())
    return tmp_path


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def keep(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def holes(folder: Path) -> str:
    with pytest.raises(TraceError) as raised:
        read_trace(folder)
    return str(raised.value)


def test_a_whole_trace_is_read(folder: Path):
    trace = read_trace(folder)
    assert [row["step"] for row in trace.rows] == [0, 1, 2, 3]
    assert sum(end["fate"] == "trained" for end in trace.ends) == 4 * 16


def test_missing_steps_are_counted(folder: Path):
    file = RunFiles(folder).metrics_file
    keep(file, [row for row in lines(file) if row["step"] not in (0, 2)])
    assert "2 (0, 2) of 4 steps missing" in holes(folder)


def test_a_step_recorded_twice_is_a_hole_too(folder: Path):
    file = RunFiles(folder).metrics_file
    keep(file, [*lines(file), lines(file)[1]])
    assert "1 (1) recorded twice" in holes(folder)


def test_missing_trajectories_are_told_by_step(folder: Path):
    file = RunFiles(folder).ends_file
    trained = [end for end in lines(file) if end["fate"] == "trained"]
    gone = {end["key"] for end in trained if end["step"] == 1} - {trained[-1]["key"]}
    keep(file, [end for end in lines(file) if end["key"] not in set(sorted(gone)[:3])])
    assert "step 1 has 13 of 16" in holes(folder)


def test_times_lengths_and_stages_that_are_missing_are_told_together(folder: Path):
    files = RunFiles(folder)
    rows = lines(files.metrics_file)
    rows[2]["seconds/step"] = None
    keep(files.metrics_file, rows)
    ends = lines(files.ends_file)
    ends[0]["sampled_tokens"] = None
    keep(files.ends_file, ends)
    spans = lines(files.timeline_file)
    keep(files.timeline_file, [span for span in spans if (span["stage"], span["step"]) != ("train_step", 3)])
    told = holes(folder)
    assert "no seconds/step for 1 (2) of 4 steps" in told
    assert f"{ends[0]['key']} (sampled_tokens is None)" in told
    assert "no train_step of 1 (3) of 4 steps" in told


def test_a_damaged_line_and_an_empty_folder_are_holes(folder: Path, tmp_path: Path):
    file = RunFiles(folder).metrics_file
    file.write_text("{\n" + file.read_text())
    assert "line 1" in holes(folder)
    assert "no finished step" in holes(tmp_path / "nothing")
