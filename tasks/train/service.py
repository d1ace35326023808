"""The trainer's process: batches come by name from the sample buffer, weights go to the weight store."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from blocks.sample_buffer import SampleBuffer
from blocks.weight_store import WeightStore
from infra.clock import now
from infra.object_store import ObjectStore
from infra.rpc import RpcConnection, RpcServer
from tasks.campaign import Campaign
from tasks.train.algorithms import make_algorithm
from tasks.train.checkpoint import Checkpoints
from tasks.train.trainers.torch import TorchTrainer
from tasks.trajectory_arrow import from_arrow
from tasks.weights.publication import publish


class TrainerService:
    """One command at a time; the event loop stays free to answer while one runs."""

    def __init__(self, campaign: Campaign, model: Path, samples: str, weights: str, checkpoints: str):
        torch.set_num_threads(campaign.train.trainer.threads)
        self._buffer = SampleBuffer(ObjectStore(samples))
        self._weights = WeightStore(ObjectStore(weights))
        self._checkpoints = Checkpoints(ObjectStore(checkpoints), keep=campaign.train.checkpoint.keep)
        self._algorithm = make_algorithm(campaign.train.algorithm)
        self._trainer = TorchTrainer(
            model, campaign.train.trainer, temperature=campaign.rollout.temperature, seed=campaign.seed
        )
        self._trainer.restore(self._checkpoints)

    @property
    def version(self) -> int:
        return self._trainer.version

    def train(self, trajectories: list[tuple[str, int]]) -> dict[str, float]:
        """One train step on the batch of these (name, version partition), and the metrics of it."""
        batch = [from_arrow(data) for data in self._buffer.get_many(trajectories)]
        return self._trainer.train_step(self._algorithm.prepare(batch), self._algorithm)

    def save(self) -> None:
        self._trainer.save(self._checkpoints)

    def publish(self) -> dict[str, Any]:
        publication = publish(self._weights, self._trainer.version, self._trainer.named_weights())
        return {
            "version": publication.version,
            "bytes": publication.bytes,
            "unchanged": publication.unchanged,
        }


async def serve_trainer(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Settings: campaign, model, samples, weights, checkpoints (URLs), token."""
    service = await asyncio.to_thread(
        TrainerService,
        Campaign.parse(settings["campaign"]),
        Path(settings["model"]),
        settings["samples"],
        settings["weights"],
        settings["checkpoints"],
    )

    async def train_step(payload: Any, _: RpcConnection) -> dict[str, float]:
        started = now()
        metrics = await asyncio.to_thread(service.train, [tuple(entry) for entry in payload["trajectories"]])
        return {**metrics, "train/seconds": now() - started}

    async def save_checkpoint(_: Any, __: RpcConnection) -> None:
        await asyncio.to_thread(service.save)

    async def publish_weights(_: Any, __: RpcConnection) -> dict[str, Any]:
        return await asyncio.to_thread(service.publish)

    handlers = (train_step, save_checkpoint, publish_weights)
    server = RpcServer({handler.__name__: handler for handler in handlers}, token=settings.get("token"))
    url = await server.start(settings.get("host", "127.0.0.1"), settings.get("port", 0))
    ready({"url": url, "version": service.version})
    await asyncio.Event().wait()


if __name__ == "__main__":
    from infra.processes import serve

    logging.basicConfig(level=logging.INFO)
    serve(serve_trainer)
