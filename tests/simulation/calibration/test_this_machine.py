import asyncio
import json
from pathlib import Path

import pytest

from infra.models import MODELS
from infra.performance.calibrated import Calibration, Fitted
from infra.performance.host_costs import HostCosts
from tasks.simulation.calibration.machine_fit import Calibrated
from tasks.simulation.calibration.parts_alone import Shape, measure_engine, measure_sharing, measure_trainer
from tasks.simulation.calibration.this_machine import (
    Case,
    Compared,
    Outcome,
    measured,
    predict,
    run_for_real,
    table,
)
from tasks.simulation.calibration.waiting import WaitingTurns
from tasks.simulation.workload import DomainWorkload
from tests.bench import small_llama
from tests.simulation.calibration.runs import trajectory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    small_llama.build(folder, shape=small_llama.TINY)
    return folder


@pytest.fixture
def calibrated(tmp_path: Path) -> Calibrated:
    """2 ms an iteration, 4 turns of 16 tokens."""
    return Calibrated(
        Calibration(
            name="here",
            fitted_on="nothing",
            hardware={
                "cpu": Fitted(
                    iteration={"iteration_s": 0.002, "sequence_s": 0.0001, "layer_s": 0.0},
                    training={"step_s": 0.3, "micro_batch_s": 0.0},
                )
            },
            host=HostCosts(cores=2, control_trajectory_s=0.002, worker_turn_s=0.001, proxy_turn_s=0.0005),
        ),
        {
            "waiting": DomainWorkload.model_validate(
                {"prompt_tokens": 20, "turns": 4, "response_tokens": 16, "observation_tokens": 8}
            )
        },
        {"transport": "store", "latency_s": 0.0, "push_gb_s": 1.0, "pull_gb_s": 1.0},
        {"max_running": 64, "max_batch_tokens": 2048},
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["qwen3-0.6b"]))
    return folder


def predicted(case: Case, calibrated: Calibrated, model: Path, folder: Path) -> Outcome:
    folder.mkdir()
    return predict(case, calibrated, model, folder, steps=5)


def test_a_longer_latency_takes_the_longer_for_each_turn(
    calibrated: Calibrated, model: Path, tmp_path: Path
) -> None:
    short = predicted(Case("short", groups=2), calibrated, model, tmp_path / "short")
    long = predicted(Case("long", groups=2, mean_ms=250), calibrated, model, tmp_path / "long")
    added = long.stages["get_batch"] - short.stages["get_batch"]
    assert added == pytest.approx(4 * 0.2, rel=0.1)
    assert long.step_seconds - short.step_seconds == pytest.approx(added, rel=0.05)


def test_overlap_is_worth_less_than_it_would_be_on_cores_of_its_own(
    calibrated: Calibrated, model: Path, tmp_path: Path
) -> None:
    one_core = calibrated.calibration.model_copy(
        update={"host": calibrated.calibration.host.model_copy(update={"cores": 1})}  # type: ignore[union-attr]
    )
    shared = Calibrated(one_core, calibrated.workload, calibrated.weights, calibrated.engine_options)
    case = Case("tutti", mode="tutti", alpha=1, groups=4)
    apart = predicted(case, calibrated, model, tmp_path / "apart")
    together = predicted(case, shared, model, tmp_path / "together")
    assert together.stages["train_step"] > 1.2 * apart.stages["train_step"]
    assert together.step_seconds > apart.step_seconds


def test_the_table_says_what_is_within_the_goal() -> None:
    rows = [
        Compared("near", Outcome(1.05, {}), Outcome(1.0, {})),
        Compared("far", Outcome(0.8, {}), Outcome(1.0, {})),
    ]
    near, far = table(rows).splitlines()[1:]
    assert "+5.0%" in near
    assert near.endswith("yes")
    assert "-20.0%" in far
    assert far.endswith("no")


def test_the_waiting_environment_ends_after_its_turns() -> None:
    world = WaitingTurns(turns=2, mean_ms=0)
    world.reset(5)
    first, second = world.step("a"), world.step("b")
    assert (first.terminated, second.terminated) == (False, True)
    with pytest.raises(ValueError, match="turns must be at least 1"):
        WaitingTurns(turns=0, mean_ms=1)


def test_engine_and_trainer_are_measured_by_themselves(llama: Path, tmp_path: Path) -> None:
    shapes = [Shape(1, 16, 8), Shape(4, 32, 4)]
    work, seconds = asyncio.run(measure_engine(llama, 128, shapes, repeats=1))
    assert [done[2] for done in work] == [16, 4 * 32]
    assert 4 <= work[1][1] <= 16
    assert all(taken > 0 for taken in seconds)
    campaign = Case("alone").campaign(tmp_path, 4, llama)
    batches = [[trajectory(group, member) for group in range(2) for member in range(2)]]
    [(lengths, taken)] = measure_trainer(campaign, llama, batches, repeats=1)
    assert lengths == [130] * 4
    assert taken > 0


def test_two_on_two_cores_are_not_quicker_than_one() -> None:
    assert 0.2 < measure_sharing(2, repeats=2) <= 1


@pytest.mark.slow
def test_a_real_run_is_read_while_it_runs(llama: Path, tmp_path: Path) -> None:
    case = Case("real", groups=1, group_size=2, mean_ms=1.0)

    folder, readings = asyncio.run(run_for_real(case.campaign(tmp_path, 3, llama), "real"))
    first, last = readings[0], readings[-1]
    assert (first.step, last.step) == (0, 3)
    assert set(last.cpu) == {"control", "proxy", "engine", "trainer", "worker", "host"}
    assert all(last.cpu[role] >= seconds for role, seconds in first.cpu.items())
    assert last.counters["turns"] >= 3 * 2
    assert measured(folder, warm_up=1).step_seconds > 0
