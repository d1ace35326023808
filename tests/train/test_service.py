"""The trainer as a service, in one process and in two ranks, through its calls."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from blocks.sample_buffer import SampleBuffer
from blocks.weight_store import open_weight_store
from infra.object_store import ObjectStore
from infra.processes import ServiceFailed, ServiceProcess, tail
from infra.rpc import RpcClient, RpcError
from tasks.campaign import Campaign
from tasks.train.algorithms import make_algorithm
from tasks.train.checkpoint import Checkpoints
from tasks.train.launch import describe
from tasks.train.trainers.torch import TorchTrainer
from tasks.trajectory_arrow import to_arrow
from tasks.weights.publication import load
from tests.train.trainers.batches import random_trajectories
from tests.train.trainers.models import tiny_llama

START_S = 240.0


def _campaign(processes: int) -> Campaign:
    return Campaign.parse(
        {
            "name": "service",
            "domains": {"sums": {"source": "reasoning_gym", "max_tokens": 64}},
            "train": {
                "groups": 4,
                "group_size": 4,
                "steps": 3,
                "trainer": {"kind": "torch", "processes": processes, "micro_batch_tokens": 64},
            },
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and the trajectories of three steps in a sample buffer."""
    folder = tmp_path_factory.mktemp("trainer")
    tiny_llama(folder / "model")
    buffer = SampleBuffer(ObjectStore(str(folder / "samples")))
    for step in range(3):
        for index, trajectory in enumerate(random_trajectories(step)):
            buffer.put(f"t{step}-{index}", step, to_arrow(trajectory))
    return folder


def _batch(step: int) -> dict[str, Any]:
    return {"step": step, "trajectories": [[f"t{step}-{index}", step] for index in range(16)]}


def _settings(folder: Path, processes: int, name: str, model: str = "model") -> dict[str, Any]:
    return {
        "campaign": _campaign(processes).model_dump(mode="json"),
        "model": str(folder / model),
        "samples": str(folder / "samples"),
        "weights": str(folder / name / "weights"),
        "checkpoints": str(folder / name / "checkpoints"),
        "token": "secret",
    }


@asynccontextmanager
async def _service(
    folder: Path, processes: int, name: str
) -> AsyncIterator[tuple[ServiceProcess, RpcClient]]:
    process = await ServiceProcess.start(
        "trainer",
        "tasks.train.service",
        _settings(folder, processes, name),
        folder / name / "log",
        environment={"OMP_NUM_THREADS": "1"},
        start_limit_s=START_S,
    )
    client = await RpcClient(process.url, token="secret").connect()
    try:
        yield process, client
    finally:
        await client.close()
        await process.stop()


def _ranks(process: ServiceProcess) -> dict[int, psutil.Process]:
    children = psutil.Process(process.process.pid).children(recursive=True)
    return {int(child.environ()["RANK"]): child for child in children}


def _in_process(folder: Path) -> tuple[list[dict[str, float]], TorchTrainer]:
    """What the first two steps give without a service."""
    campaign = _campaign(1)
    trainer = TorchTrainer(
        folder / "model", campaign.train.trainer, temperature=campaign.rollout.temperature, steps=3
    )
    algorithm = make_algorithm(campaign.train.algorithm)
    return [
        trainer.train_step(algorithm.prepare(random_trajectories(step)), algorithm) for step in range(2)
    ], trainer


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
async def test_a_service_trains_saves_publishes_and_resumes(folder: Path, processes: int) -> None:
    expected, trainer = _in_process(folder)
    name = f"serves-{processes}"
    samples = ObjectStore(str(folder / "samples"))
    samples.delete("archive")
    async with _service(folder, processes, name) as (process, client):
        assert process.ready["version"] == 0
        assert len(_ranks(process) if processes > 1 else [0]) == processes
        assert (await client.call("publish_weights", {"keep_from": 0}))["version"] == 0
        for step in range(2):
            metrics = await client.call("train_step", _batch(step))
            assert metrics.pop("train/seconds") > 0
            ages = {name: metrics.pop(name) for name in list(metrics) if name.startswith("staleness/")}
            sampled = sum(trajectory.sampled_tokens for trajectory in random_trajectories(step))
            assert ages["staleness/tokens"] == [0] * step + [sampled]  # all of version 0
            assert metrics.keys() == expected[step].keys()
            for metric in metrics.keys() - {"train/padded_tokens"}:
                assert metrics[metric] == pytest.approx(expected[step][metric], rel=1e-5, abs=1e-6), metric
        # A batch is trained once, and one that cannot be read harms nothing.
        with pytest.raises(RpcError, match="wrong_step"):
            await client.call("train_step", _batch(1))
        with pytest.raises(RpcError, match="unreadable_batch"):
            await client.call("train_step", {"step": 2, "trajectories": [["absent", 2]]})
        await client.call("save_checkpoint")
        published = await client.call("publish_weights", {"keep_from": 1})
        assert (published["version"], published["unchanged"]) == (2, False)
    store = open_weight_store(str(folder / name / "weights"))
    assert store.versions() == [2]
    weights = load(store, 2)
    for tensor, weight in trainer.named_weights():
        assert float((weights[tensor] - weight).norm()) <= 1e-4 * float(weight.norm()), tensor
    assert samples.list("archive") == [f"archive/step-{step:08d}.parquet" for step in range(2)]

    # The other number of processes takes the run over: its first label is the next step's, no later one.
    async with _service(folder, 3 - processes, name) as (process, client):
        assert process.ready["version"] == 2
        assert (await client.call("publish_weights", {"keep_from": 2}))["version"] == 2
        metrics = await client.call("train_step", _batch(2))
        algorithm = make_algorithm(_campaign(1).train.algorithm)
        last = trainer.train_step(algorithm.prepare(random_trajectories(2)), algorithm)
        assert metrics["train/loss"] == pytest.approx(last["train/loss"], rel=1e-4, abs=1e-6)
        ranks = _ranks(process) if processes == 1 else {}
        if ranks:
            await _kill_a_rank(process, client, ranks)
    assert Checkpoints(ObjectStore(str(folder / name / "checkpoints")), keep=2).steps() == [2]


async def _kill_a_rank(process: ServiceProcess, client: RpcClient, ranks: dict[int, psutil.Process]) -> None:
    """One clear error, to the caller and in the log; nothing hangs and no rank is left."""
    ranks[1].send_signal(signal.SIGKILL)
    with pytest.raises(RpcError, match=r"trainer_lost|connection_lost"):
        await client.call("publish_weights", {"keep_from": 2}, timeout_s=60)
    assert await process.wait() == 1
    assert "rank 1 was ended by SIGKILL" in tail(process.log)
    _, alive = psutil.wait_procs(list(ranks.values()), timeout=30)
    assert not alive


@pytest.mark.slow
async def test_no_rank_outlives_a_killed_service(folder: Path) -> None:
    async with _service(folder, 2, "killed") as (process, _):
        ranks = _ranks(process)
        assert ranks.keys() == {0, 1}
        os.kill(process.process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(list(ranks.values()), timeout=30)
        assert not alive


@pytest.mark.slow
async def test_ranks_that_cannot_start_are_one_error_with_the_cause(folder: Path) -> None:
    trainer = TorchTrainer(
        tiny_llama(folder / "other", vocabulary=48), _campaign(1).train.trainer, temperature=1.0
    )
    trainer.save(Checkpoints(ObjectStore(str(folder / "misfit" / "checkpoints")), keep=1))
    with pytest.raises(ServiceFailed, match=r"the trainer ended, since rank"):
        async with _service(folder, 2, "misfit"):
            pass
    assert "model.path" in (folder / "misfit" / "log").read_text()


def test_ranks_that_were_killed_are_named_before_those_that_failed_of_it() -> None:
    message = describe({0: 1, 1: -9})
    assert message.startswith("the trainer ended, since rank 1 was ended by SIGKILL; rank 0 ended with exit")
