from pathlib import Path

import numpy as np
import pytest

from infra.hardware import CATALOGUE, hardware
from infra.models import model_of
from infra.performance.calibrated import FOLDER, Calibration, Fitted, UnknownCalibration
from infra.performance.calibration import fit, fit_iterations, kernel_calibration
from infra.performance.coefficients import DEFAULT, coefficients_of
from infra.performance.iteration import BatchWork, IterationModel

KERNELS = Path(__file__).parents[4] / "shared" / "anchors" / "h20-h800-kernels"


def test_coefficients_that_made_the_times_are_found_again():
    device, size = hardware("h800"), model_of("qwen3-8b")
    true = coefficients_of(device).changed(
        {"gemm_bandwidth": 0.6, "kv_bandwidth": 0.5, "layer_s": 6e-5, "gemm_compute": 0.4}
    )
    model = IterationModel(size, device, None, true)
    works = [
        BatchWork(count, count * context, prompt, prompt**2 / 2, min(prompt, 1))
        for count in (1, 16, 400)
        for context in (100, 8000)
        for prompt in (0, 8192)
    ]
    found = fit_iterations(
        [(work, model.seconds(work)) for work in works],
        size,
        device,
        free=("gemm_bandwidth", "gemm_compute", "kv_bandwidth", "layer_s"),
    )
    assert found.unbound == ()
    assert found.residual.count == 12
    assert found.residual.p90 < 1e-3
    for name, value in found.values.items():
        assert value == pytest.approx(getattr(true, name), rel=0.01)


def test_an_outlier_moves_the_fit_little():
    sizes = np.arange(1.0, 21.0)
    times = 3 * sizes
    times[7] *= 10
    found = fit(lambda values: values["slope"] * sizes, {"slope": 1.0}, times)
    assert found.values["slope"] == pytest.approx(3, rel=0.02)


def test_a_coefficient_that_no_measurement_depends_on_stays_where_it_was():
    found = fit(lambda values: np.full(3, values["told"]), {"told": 1.0, "silent": 5.0}, [2.0, 2.0, 2.0])
    assert found.unbound == ("silent",)
    assert found.values == {"told": pytest.approx(2.0), "silent": 5.0}


def test_too_few_or_impossible_measurements_are_refused():
    with pytest.raises(ValueError, match="1 measurements do not determine 2 coefficients"):
        fit(lambda values: np.array([1.0]), {"a": 1.0, "b": 1.0}, [1.0])
    with pytest.raises(ValueError, match="have to be positive"):
        fit(lambda values: np.array([1.0]), {"a": 1.0}, [0.0])


def test_a_calibration_is_kept_and_found_by_name_or_file(tmp_path):
    kept = Calibration(name="mine", fitted_on="my run", hardware={"h20": Fitted(iteration={"layer_s": 1e-5})})
    kept.save(tmp_path / "deep" / "mine.json")
    assert Calibration.named(tmp_path / "deep" / "mine.json") == kept
    assert coefficients_of(hardware("h20"), kept).layer_s == 1e-5
    assert coefficients_of(hardware("h800"), kept) == coefficients_of(hardware("h800"))
    with pytest.raises(UnknownCalibration, match=r"'yours'.*h20-kernels, h800-kernels"):
        Calibration.named("yours")
    wrong = Calibration(name="x", fitted_on="x", hardware={"h20": Fitted(iteration={"speed": 1})})
    with pytest.raises(ValueError, match="speed; there are gemm_compute"):
        coefficients_of(hardware("h20"), wrong)


def test_all_hardware_has_coefficients_and_the_measured_its_own():
    for entry in CATALOGUE.values():
        share = coefficients_of(entry)
        for name in ("gemm_compute", "gemm_bandwidth", "kv_bandwidth", "attention_compute"):
            assert 0 < getattr(share, name) <= 1
    assert coefficients_of(hardware("h20")).attention_compute > DEFAULT.attention_compute
    assert coefficients_of(hardware("h100")) == coefficients_of(hardware("h800"))


@pytest.mark.skipif(not KERNELS.is_dir(), reason="the kernel times are not beside this checkout")
@pytest.mark.parametrize("name", ["h20", "h800"])
def test_the_committed_shares_are_those_that_the_kernel_times_give(name):
    kept, fits = kernel_calibration(KERNELS, name)
    committed = Calibration.load(FOLDER / f"{name}-kernels.json")
    for key, value in kept.of(name).iteration.items():
        assert committed.of(name).iteration[key] == pytest.approx(value, rel=0.02)
    for kernel, found in fits.items():
        assert committed.of(name).residuals[kernel].median == pytest.approx(found.residual.median, abs=0.01)
        assert found.residual.median < 0.15
