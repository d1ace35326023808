from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.simulation.calibration.trace import TraceError
from tasks.simulation.validation.serving_run import Requests, Served, ServingRun
from tests.simulation.validation.runs import served, write, write_rows


def test_a_run_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    run = served(60)
    rows = write(tmp_path / "run", run)
    write_rows(tmp_path / "run", rows[::-1])
    loaded = ServingRun.load(tmp_path / "run")
    assert (loaded.hardware, loaded.max_running, loaded.max_batch_tokens) == ("RTX4090", 64, 2048)
    assert (loaded.served.requests.context == run.requests.context).all()
    # The wall clock's 1.7e9 seconds leave it a resolution of 2.4e-7.
    assert loaded.served.latency == pytest.approx(run.latency, abs=1e-6)
    assert loaded.served.ttft == pytest.approx(run.ttft, abs=1e-6)


def test_what_is_derived_from_times() -> None:
    requests = Requests(np.array([0.0, 1.0]), np.array([10, 10]), np.array([5, 1]))
    run = Served(requests, np.array([2.0, 3.0]), np.array([4.0, 3.0]))
    assert run.makespan == 4.0
    assert run.tokens_per_s == 1.5
    assert run.latency.tolist() == [4.0, 2.0]
    assert run.ttft.tolist() == [2.0, 2.0]
    assert run.tpot.tolist() == [0.5, 0.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"last_token_ts": None}, "line 3: there is no last_token_ts"),
        ({"queued_ts": float("nan"), "input_toks": "7"}, "line 3: there is no input_toks, queued_ts"),
        ({"first_token_ts": 1.0}, "line 3: queued at .* first token at 1.0, .* out of order"),
        ({"output_toks": 0}, "line 3: .* and 0 tokens"),
    ],
)
def test_a_request_with_a_hole_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    rows = write(tmp_path / "run", served(40))
    rows[2] |= changes
    write_rows(tmp_path / "run", rows)
    with pytest.raises(TraceError, match=message):
        ServingRun.load(tmp_path / "run")


def test_requests_that_are_missing_are_counted(tmp_path: Path) -> None:
    rows = write(tmp_path / "run", served(40))
    write_rows(tmp_path / "run", rows[:-3])
    with pytest.raises(TraceError, match="has 37 of 40 requests"):
        ServingRun.load(tmp_path / "run")


def test_a_folder_without_its_files_is_named(tmp_path: Path) -> None:
    write(tmp_path / "run", served(40))
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(TraceError, match="lacks 'nodes'"):
        ServingRun.load(tmp_path / "run")
    with pytest.raises(TraceError, match="No such file"):
        ServingRun.load(tmp_path)
