"""The trainer's process: batches come by name from the sample buffer, weights go to the weight store."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blocks.sample_buffer import SampleBuffer
from blocks.weight_store import WeightStore
from infra.clock import now
from infra.object_store import ObjectStore
from infra.rpc import RpcConnection, RpcError, RpcServer
from tasks.campaign import Campaign
from tasks.train.algorithms import make_algorithm
from tasks.train.archive import write_archive
from tasks.train.checkpoint import Checkpoints
from tasks.train.trainers.torch import TorchTrainer
from tasks.trajectory_arrow import from_arrow
from tasks.weights.publication import collect, publish


class TrainerService:
    """One command at a time; the event loop stays free to answer while one runs."""

    def __init__(self, campaign: Campaign, model: Path, samples: str, weights: str, checkpoints: str):
        self._buffer = SampleBuffer(ObjectStore(samples))
        self._weights = WeightStore(ObjectStore(weights))
        self._checkpoints = Checkpoints(ObjectStore(checkpoints), keep=campaign.train.checkpoint.keep)
        self._archive = ObjectStore(samples)
        self._algorithm = make_algorithm(campaign.train.algorithm)
        self._trainer = TorchTrainer(
            model,
            campaign.train.trainer,
            temperature=campaign.rollout.temperature,
            seed=campaign.seed,
            steps=campaign.train.steps,
        )
        self._trainer.restore(self._checkpoints)

    @property
    def version(self) -> int:
        return self._trainer.version

    def train(self, step: int, trajectories: list[tuple[str, int]]) -> dict[str, float]:
        """One train step on the batch of these (name, version partition), and the metrics of it.

        Raises `RpcError` when the step is not the next one: a batch is trained once.
        """
        if step != self.version:
            raise RpcError(
                "wrong_step", f"asked to train step {step} on the weights of version {self.version}"
            )
        batch = [from_arrow(data) for data in self._buffer.get_many(trajectories)]
        metrics = self._trainer.train_step(self._algorithm.prepare(batch), self._algorithm)
        write_archive(self._archive, step, step, batch)
        return metrics

    def save(self) -> None:
        self._trainer.save(self._checkpoints)

    def publish(self, keep_from: int) -> dict[str, Any]:
        """Push the present weights, and drop versions below `keep_from`."""
        publication = publish(self._weights, self._trainer.version, self._trainer.named_weights())
        collect(self._weights, range(keep_from, self._trainer.version + 1))
        return {
            "version": publication.version,
            "bytes": publication.size,
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
        names = [tuple(entry) for entry in payload["trajectories"]]
        metrics = await asyncio.to_thread(service.train, payload["step"], names)
        return {**metrics, "train/seconds": now() - started}

    async def save_checkpoint(_: Any, __: RpcConnection) -> None:
        await asyncio.to_thread(service.save)

    async def publish_weights(payload: Any, _: RpcConnection) -> dict[str, Any]:
        return await asyncio.to_thread(service.publish, payload["keep_from"])

    handlers = (train_step, save_checkpoint, publish_weights)
    server = RpcServer({handler.__name__: handler for handler in handlers}, token=settings.get("token"))
    url = await server.start(settings.get("host", "127.0.0.1"), settings.get("port", 0))
    ready({"url": url, "version": service.version})
    await asyncio.Event().wait()


if __name__ == "__main__":
    from infra.processes import serve

    logging.basicConfig(level=logging.INFO)
    serve(serve_trainer)
