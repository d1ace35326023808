import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from flows.reproduce import EXPERIMENTS, known, main


def test_every_experiment_has_its_module() -> None:
    assert all(find_spec(module) is not None for module in EXPERIMENTS.values())


def test_experiments_run_in_their_order_whatever_is_asked_first() -> None:
    assert known([]) == list(EXPERIMENTS)
    assert known(["redundancy", "modes"]) == ["modes", "redundancy"]


def test_an_experiment_that_does_not_exist_is_an_error_that_names_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["reproduce", "--only", "speed"])
    assert main() == 2
    assert "there is no experiment speed; there are breakdown, modes" in capsys.readouterr().err


@pytest.mark.slow
def test_the_flow_prints_the_rows_and_writes_them(prefect_server: dict[str, str], tmp_path: Path) -> None:
    result = tmp_path / "reproduce.json"
    run = subprocess.run(
        [sys.executable, "-m", "flows.reproduce", "--only", "redundancy", "--quick", "--result", str(result)],
        env=prefect_server,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (row,) = json.loads(result.read_text())["rows"]
    assert row["published"] == 1.62
    assert row["deviation"] == pytest.approx(row["ours"] / 1.62 - 1)
    assert "redundancy: rollout time of 32 groups of 8" in run.stdout + run.stderr
