import dataclasses

import numpy as np
import pytest

from infra.hardware import hardware
from infra.models import model_of
from infra.performance.calibrated import Fitted
from infra.performance.coefficients import coefficients_of
from infra.performance.iteration import BatchWork, IterationModel
from infra.performance.parallel import Parallel
from infra.performance.training import TrainingCoefficients, TrainingModel
from tasks.simulation.calibration.cost_fits import Placed, fit_engine_turns, fit_engine_work, fit_training
from tasks.simulation.calibration.least_squares import costs
from tests.simulation.calibration.runs import trajectory

SIZE = model_of("qwen3-0.6b")
CPU = Placed(hardware("cpu"))


def training_model(fitted: Fitted) -> TrainingModel:
    kernels = coefficients_of(CPU.hardware).changed(fitted.iteration)
    return TrainingModel(SIZE, CPU.hardware, Parallel(), TrainingCoefficients(**fitted.training), kernels)


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_costs_are_found_again(noise: float) -> None:
    draw = np.random.default_rng(0)
    work = draw.uniform(0, 100, (200, 3))
    seconds = work @ np.array([0.002, 0.01, 0.0004]) * (1 + noise * draw.standard_normal(200))
    assert costs(work.tolist(), seconds.tolist()) == pytest.approx(
        [0.002, 0.01, 0.0004], rel=0.02 + noise * 20
    )


def test_no_cost_is_negative() -> None:
    found = costs([[1, 5], [1, 10], [1, 20]], [3.0, 2.9, 2.8])
    assert found[1] == 0
    assert found[0] == pytest.approx(2.9)


def test_fewer_measurements_than_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="1 measurements do not determine 2"):
        costs([[1, 2]], [3.0])


def test_a_trainer_takes_again_what_it_took() -> None:
    batches = [[200] * 8, [200] * 16, [200] * 24, [200] * 40]
    tokens = [sum(batch) for batch in batches]
    seconds = [0.4 + 0.002 * count for count in tokens]
    fitted = fit_training(SIZE, CPU, list(zip(batches, seconds, strict=True)), Fitted())
    # Of the 0.4 s, the optimiser's reading and writing of 32 bytes a parameter is the model's own.
    optimiser_s = 32 * SIZE.parameters / (0.86 * CPU.hardware.bandwidth_tb_s * 1e12)
    assert fitted.training["step_s"] == pytest.approx(0.4 - optimiser_s, rel=0.02)
    model = training_model(fitted)
    assert [model.step_seconds(batch) for batch in batches] == pytest.approx(seconds, rel=0.02)
    assert fitted.residuals["train_step"].count == 4


def test_a_trainer_is_fitted_beside_its_kernels() -> None:
    """The share is on top of what the engine says of the same hardware."""
    engine = Fitted(iteration={"gemm_compute": 0.01, "attention_compute": 0.01})
    fitted = fit_training(SIZE, CPU, [([100] * 4, 3.0), ([100] * 12, 9.0)], engine)
    both = engine.model_copy(update={"training": fitted.training})
    assert training_model(both).step_seconds([100] * 8) == pytest.approx(6.0, rel=0.02)


def test_of_steps_of_one_size_only_the_share_is_fitted() -> None:
    fitted = fit_training(SIZE, CPU, [([100] * 8, 2.0), ([101] * 8, 2.2)], Fitted())
    assert fitted.training["step_s"] == 0
    assert training_model(fitted).step_seconds([100] * 8) == pytest.approx(2.1, rel=0.03)
    with pytest.raises(ValueError, match="at least one train step"):
        fit_training(SIZE, CPU, [], Fitted())


def test_an_engine_takes_again_what_its_counters_took() -> None:
    draw = np.random.default_rng(1)
    iterations = draw.integers(1, 40, 120)
    sampled = iterations * draw.integers(1, 64, 120)
    context = draw.integers(0, 4000, 120)
    # 3 ms an iteration, 0.5 ms a token and 0.2 ms more a sampled one.
    seconds = 0.003 * iterations + 0.0007 * sampled + 0.0005 * context
    work = [(float(a), float(b), float(c)) for a, b, c in zip(iterations, sampled, context, strict=True)]
    fitted = fit_engine_work(SIZE, CPU, work, seconds.tolist())
    coefficients = coefficients_of(CPU.hardware).changed(fitted.iteration)
    # Attention is no part of what was measured here.
    free = dataclasses.replace(coefficients, attention_compute=1e9, kv_bandwidth=1e9)
    model = IterationModel(SIZE, CPU.hardware, Parallel(), free)
    assert model.seconds(BatchWork(0, 0, prefill_tokens=1000, prefills=0)) == pytest.approx(0.503, rel=0.05)
    assert model.seconds(BatchWork(32, 3200)) == pytest.approx(0.003 + 32 * 0.0007, rel=0.35)
    assert fitted.residuals["engine"].median < 0.02


def test_turns_show_what_an_iteration_takes_at_their_batch() -> None:
    # 16 turns at a time, 50 ms a token.
    turns = [trajectory(0, member, response_tokens=40, generate_s=2.0) for member in range(16)]
    more = [trajectory(1, member, response_tokens=80, generate_s=4.0) for member in range(16)]
    h20 = Placed(hardware("h20"))
    fitted = fit_engine_turns(SIZE, h20, [*turns, *more], generating_s=6.0)
    coefficients = coefficients_of(h20.hardware).changed(fitted.iteration)
    model = IterationModel(SIZE, h20.hardware, Parallel(), coefficients)
    assert model.seconds(BatchWork(16, 16 * 60)) == pytest.approx(0.05, rel=0.01)
    assert fitted.residuals["turn"].p90 < 1e-6
