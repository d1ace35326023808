from pathlib import Path

import numpy as np
import pytest

from tasks.simulation.calibration.trace import TraceError
from tasks.simulation.validation.vllm_serving import (
    FREE,
    Recorded,
    calibrations,
    fit,
    line,
    load,
    rank_correlation,
    table,
    validate,
)
from tests.simulation.validation.runs import HIDDEN, served, write

ANCHORS = Path(__file__).parents[4] / "shared" / "anchors" / "vllm-serving"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "run", served(120))
    (run,) = load(folder)
    return run


def test_half_of_a_run_tells_what_the_rest_will_be(recorded: Recorded) -> None:
    half = np.arange(120) < 60
    before, after = line("", recorded, {}), line("half", recorded, fit(recorded, half))
    assert abs(before.of_makespan) > 0.1
    assert abs(after.of_makespan) < 0.02
    assert after.of_latency is not None
    assert abs(after.of_latency) < 0.02


def test_coefficients_are_found_again(recorded: Recorded) -> None:
    values = fit(recorded, np.ones(120, bool))
    assert set(values) == set(FREE)
    assert values["gemm_compute"] == pytest.approx(HIDDEN["gemm_compute"], rel=0.03)
    assert values["gemm_bandwidth"] == pytest.approx(HIDDEN["gemm_bandwidth"], rel=0.1)


def test_what_the_part_did_not_measure_does_not_count(recorded: Recorded) -> None:
    half = np.arange(120) < 60
    values = fit(recorded, half)
    run = recorded.run.served
    run.last[~half] += 100.0
    try:
        assert fit(recorded, half) == values
    finally:
        run.last[~half] -= 100.0


def test_what_was_fitted_is_kept_with_its_errors(recorded: Recorded) -> None:
    (kept,) = calibrations([recorded], {recorded.name: HIDDEN | {"sequence_s": 4e-6}})
    assert kept.name == "rtx4090-vllm"
    fitted = kept.of("rtx4090")
    assert fitted.iteration["gemm_compute"] == 0.51
    assert fitted.iteration["expert_compute"] == pytest.approx(0.60 * 0.51 / 0.70, rel=5e-3)
    assert fitted.residuals["latency"].count == 120
    assert fitted.residuals["latency"].p90 < 1e-3


def test_ranks() -> None:
    some = np.array([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(some, some**3) == pytest.approx(1.0)
    assert rank_correlation(some, -some) == pytest.approx(-1.0)
    # 1 - 6 sum d^2 / (n (n^2 - 1)), d = 0, 1, -1, 0
    assert rank_correlation(some, np.array([1.0, 3.0, 2.0, 4.0])) == pytest.approx(0.8)


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no recorded run"):
        load(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not ANCHORS.is_dir(), reason="the recorded runs are not part of the project")
def test_real_vllm_is_predicted() -> None:
    """Fitted on a half or tenth of a run, the whole: makespan and throughput within 5 %, latency 10 %."""
    lines, _ = validate(load(ANCHORS))
    judged = [one for one in lines if one.fitted_on.startswith("its first")]
    assert len(judged) >= 6
    for one in judged:
        assert abs(one.of_makespan) < 0.05, one
        assert abs(one.of_tokens_per_s) < 0.05, one
        assert abs(one.of_latency or 1.0) < 0.10, one
        assert (one.rank or 0.0) > 0.99, one
    # Other models on other numbers of the GPU: nothing of them was fitted.
    others = [one for one in lines if "qwen" in one.predicts]
    assert len(others) == 2
    for one in others:
        assert abs(one.of_makespan) < 0.10, one
    assert f"| {judged[0].fitted_on} |" in table(lines)
