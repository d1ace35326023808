import uuid
from typing import Any

import pytest

from blocks.sample_buffer import SampleBuffer
from infra.clock import now
from infra.hardware import hardware
from infra.models import model_of
from infra.object_store import ObjectStore
from infra.performance.parallel import Parallel
from infra.performance.training import TrainingModel
from infra.rpc import RpcError
from infra.virtual_time import run_virtual
from tasks.simulation.cluster import TrainSpec, WeightsSpec
from tasks.simulation.machine import ManyMachines
from tasks.simulation.trainer import SimulatedTrainer
from tasks.simulation.weights import SimulatedWeights
from tasks.train.config import TrainConfig
from tasks.trajectory_arrow import to_arrow
from tests.builders import trajectory_of

SIZE = model_of("qwen3-1.7b")
MODEL = TrainingModel(SIZE, hardware("h100"), Parallel(data=4))


def trainer(config: dict[str, Any] | None = None, **spec: Any) -> SimulatedTrainer:
    buffer = SampleBuffer(ObjectStore(f"held://{uuid.uuid4().hex}"))
    for member in range(4):
        trajectory = trajectory_of(member=member, response=(9,) * (10 + member))
        buffer.put(str(trajectory.key), 0, to_arrow(trajectory))
    return SimulatedTrainer(
        MODEL,
        TrainSpec.model_validate({"pool": "gpus", "devices": 4, **spec}),
        TrainConfig.model_validate(config or {}),
        buffer,
        SimulatedWeights(SIZE, WeightsSpec(transport="nccl"), 1),
        ManyMachines(),
    )


BATCH = {"step": 0, "trajectories": [(f"g00000000-m00{member}-a00", 0) for member in range(4)]}
LENGTHS = [13, 14, 15, 16]


async def timed(of: SimulatedTrainer, command: str, payload: Any = None) -> tuple[float, Any]:
    began = now()
    answer = await of.run(command, payload)
    return now() - began, answer


def test_a_step_takes_as_long_as_its_trajectories_are_long() -> None:
    trained = trainer()
    seconds, metrics = run_virtual(timed(trained, "train_step", BATCH))
    assert seconds == pytest.approx(MODEL.step_seconds(LENGTHS))
    assert trained.busy_seconds == pytest.approx(seconds)
    assert trained.version == 1
    assert metrics["train/tokens"] == 10 + 11 + 12 + 13
    assert metrics["train/sequences"] == 4
    assert metrics["staleness/tokens"] == [46]


def test_mini_batches_cost_a_forward_pass_and_a_step_each() -> None:
    config = {"trainer": {"mini_batches": 2}, "groups": 2, "group_size": 2}
    seconds, _ = run_virtual(timed(trainer(config), "train_step", BATCH))
    parts = MODEL.step_seconds(LENGTHS[:2]) + MODEL.step_seconds(LENGTHS[2:])
    assert seconds == pytest.approx(parts + MODEL.forward_seconds(LENGTHS))


def test_a_reference_costs_a_forward_pass() -> None:
    config = {"algorithm": {"kl_coefficient": 0.1}}
    seconds, _ = run_virtual(timed(trainer(config), "train_step", BATCH))
    assert seconds == pytest.approx(MODEL.step_seconds(LENGTHS) + MODEL.forward_seconds(LENGTHS))


def test_a_colocated_trainers_state_comes_and_goes() -> None:
    """18 bytes a parameter, a quarter of them over each of four links of 10 GB/s, in and out."""
    seconds, _ = run_virtual(timed(trainer(colocated=True, host_gb_s=10.0), "train_step", BATCH))
    moved = 2 * 18 * SIZE.parameters / (4 * 10e9)
    assert seconds == pytest.approx(MODEL.step_seconds(LENGTHS) + moved)


def test_a_checkpoint_takes_time_where_its_rate_is_given() -> None:
    """Master weights and two moments: 12 bytes a parameter."""
    assert run_virtual(timed(trainer(), "save_checkpoint"))[0] == 0.0
    seconds, _ = run_virtual(timed(trainer(checkpoint_gb_s=0.5), "save_checkpoint"))
    assert seconds == pytest.approx(12 * SIZE.parameters / (4 * 0.5e9))


def test_a_step_out_of_turn_is_refused() -> None:
    with pytest.raises(RpcError, match="wrong_step"):
        run_virtual(timed(trainer(), "train_step", {**BATCH, "step": 1}))
