from pathlib import Path

import pytest

from infra.hardware import hardware
from infra.models import model_of
from infra.performance.coefficients import coefficients_of
from infra.performance.parallel import Parallel
from infra.performance.training import TrainingModel, training_coefficients_of
from tasks.simulation.calibration.cost_fits import Placed
from tasks.simulation.calibration.machine_fit import Calibrated, calibrate
from tasks.simulation.calibration.parts_alone import Work
from tasks.simulation.calibration.readings import Reading
from tests.simulation.calibration.runs import trajectory, write_run

ENGINE_ALONE: tuple[list[Work], list[float]] = (
    [(96.0, 96.0, 16.0), (48.0, 1100.0, 400.0), (32.0, 2000.0, 1000.0), (4.0, 128.0, 6000.0)],
    # 2 ms an iteration, 0.05 ms a token, 0.02 ms more a sampled one.
    [
        96 * 0.002 + 96 * 0.00007 + 16 * 0.00005,
        48 * 0.002 + 1100 * 0.00007 + 400 * 0.00005,
        32 * 0.002 + 2000 * 0.00007 + 1000 * 0.00005,
        4 * 0.002 + 128 * 0.00007 + 6000 * 0.00005,
    ],
)
TURNS, STEPS = 2, 5


def readings(trajectories: int) -> list[Reading]:
    """Of a control plane of 20 ms a step and 3 ms a trajectory, a worker of 1 ms and a proxy of 0.5 ms a
    turn, and an engine that computes 0.1 ms a turn beside its batches."""
    turns = trajectories * TURNS
    work = (60.0, 30.0 * turns, 70.0 * trajectories)
    engine = 0.002 * work[0] + 0.00007 * work[1] + 0.00005 * work[2] + 0.0001 * turns
    cpu = {
        "control": 0.020 + 0.003 * trajectories,
        "worker": 0.001 * (turns + trajectories),
        "proxy": 0.0005 * turns,
        "engine": engine,
        "trainer": 1.0,
    }
    names = ("steps", "decode_tokens", "prefill_tokens", "turns")
    return [
        Reading(
            at=10.0 * step,
            step=step,
            cpu={role: seconds * step for role, seconds in cpu.items()},
            counters={name: step * value for name, value in zip(names, (*work, turns), strict=True)},
        )
        for step in range(STEPS + 1)
    ]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    folder = tmp_path_factory.mktemp("calibrated")
    runs = []
    for groups in (3, 6):
        steps = [
            [trajectory(groups * step + group, member) for group in range(groups) for member in range(4)]
            for step in range(STEPS)
        ]
        runs.append((write_run(folder / f"run-{groups}", steps), readings(4 * groups)))
    trainer = [([130] * 12, 0.5), ([130] * 24, 1.0), ([130] * 48, 2.0)]
    return calibrate(runs, ENGINE_ALONE, trainer, Path("qwen3-0.6b"), warm_up=2, cores=2, pace_when_full=0.7)


def test_costs_around_the_engine_are_those_of_the_processes(calibrated: Calibrated) -> None:
    host = calibrated.calibration.host
    assert host is not None
    assert (host.cores, host.pace_when_full) == (2, 0.7)
    assert host.control_step_s == pytest.approx(0.020, rel=1e-6)
    assert host.control_trajectory_s == pytest.approx(0.003, rel=1e-6)
    assert host.worker_turn_s == pytest.approx(0.001, rel=1e-6)
    assert host.proxy_turn_s == pytest.approx(0.0005 + 0.0001, rel=1e-3)
    assert host.host_turn_s == 0


def test_engine_and_trainer_are_fitted_on_what_they_did_alone(calibrated: Calibrated) -> None:
    found = calibrated.calibration.of("cpu")
    assert found.iteration["iteration_s"] == pytest.approx(0.002, rel=0.01)
    place = Placed(hardware("cpu"))
    model = TrainingModel(
        model_of("qwen3-0.6b"),
        place.hardware,
        Parallel(),
        training_coefficients_of(place.hardware, calibrated.calibration),
        coefficients_of(place.hardware, calibrated.calibration),
    )
    assert model.step_seconds([130] * 36) == pytest.approx(1.5, rel=0.02)
    assert "12 and 24 trajectories a step" in calibrated.calibration.fitted_on


def test_publication_takes_the_time_it_took(calibrated: Calibrated) -> None:
    size = model_of("qwen3-0.6b").weight_bytes / 1e9
    assert calibrated.weights["push_gb_s"] == pytest.approx(size / 0.5)
    assert calibrated.weights["pull_gb_s"] == pytest.approx(size / 0.2)
    assert calibrated.weights["latency_s"] == 0
