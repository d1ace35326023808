"""The trainer's service: batches come by name from the sample buffer, weights go to the weight store.

`python -m tasks.train.service` serves one trainer (`infra.processes` says how settings reach it). A trainer
of several processes is the same service: it starts its ranks (`tasks.train.launch`), rank 0 serves the calls
(`tasks.train.ranks`), and every rank does the work that is here.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blocks.sample_buffer import SampleBuffer
from blocks.weight_store import open_weight_store
from infra.clock import now
from infra.object_store import ObjectStore
from infra.rpc import Handler, RpcConnection, RpcError, RpcServer
from tasks.campaign import Campaign
from tasks.train.algorithms import make_algorithm
from tasks.train.archive import write_archive
from tasks.train.checkpoint import Checkpoints
from tasks.train.process_group import gather_json, rank
from tasks.train.token_ages import age_metrics
from tasks.train.trainers import make_trainer
from tasks.trajectory import Trajectory
from tasks.trajectory_arrow import from_arrow_many
from tasks.weights.publication import collect
from tasks.weights.publisher import Publisher

logger = logging.getLogger(__name__)


class TrainerService:
    """What one rank of a trainer does. The methods are collective, and only rank 0's returns count.

    An `RpcError` is raised on every rank alike, and then the trainer is as it was. Any other error ends the
    process, since the other ranks may be waiting in a collective that this one will not reach.
    """

    def __init__(self, campaign: Campaign, model: Path, samples: str, weights: str, checkpoints: str):
        self._weights = open_weight_store(weights)
        self._publisher = Publisher(self._weights, campaign.weights)
        self._checkpoints = Checkpoints(ObjectStore(checkpoints), keep=campaign.train.checkpoint.keep)
        self._archive = ObjectStore(samples)
        self._buffer = SampleBuffer(self._archive)
        self._algorithm = make_algorithm(campaign.train.algorithm)
        self._trainer = make_trainer(
            campaign.train.trainer,
            model,
            temperature=campaign.rollout.temperature,
            seed=campaign.seed,
            steps=campaign.train.steps,
        )
        self._trainer.restore(self._checkpoints)

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "TrainerService":
        """Settings: campaign, model, samples, weights, checkpoints (URLs)."""
        return cls(
            Campaign.parse(settings["campaign"]),
            Path(settings["model"]),
            settings["samples"],
            settings["weights"],
            settings["checkpoints"],
        )

    @property
    def version(self) -> int:
        return self._trainer.version

    def execute(self, command: str, payload: Any) -> Any:
        """One command, given as JSON values. Raises `RpcError`.

        What it returns may be a function that ends the work on rank 0, beside the next command.
        """
        match command:
            case "train_step":
                return self.train(payload["step"], [(name, part) for name, part in payload["trajectories"]])
            case "save_checkpoint":
                return self.save()
            case "publish_weights":
                return self.publish(payload["keep_from"])
            case "idle":
                return None
        raise RpcError("unknown_method", command)

    def train(self, step: int, trajectories: list[tuple[str, int]]) -> dict[str, Any]:
        """One train step on the batch of these (name, version partition), and the metrics of it.

        Raises `RpcError`: `wrong_step` when the step is not the next one, since a batch is trained once;
        `unreadable_batch` when a rank cannot read it; `impossible_stamps` when it holds tokens of versions
        that the step cannot have seen.
        """
        if step != self.version:
            raise RpcError(
                "wrong_step", f"asked to train step {step} on the weights of version {self.version}"
            )
        batch = self._read(trajectories)
        segments = [segment for trajectory in batch for segment in trajectory.segments()]
        try:
            ages = age_metrics(step, batch)
        except ValueError as error:
            raise RpcError("impossible_stamps", str(error)) from None
        metrics = self._trainer.train_step(self._algorithm.prepare(segments), self._algorithm)
        if rank() == 0:
            write_archive(self._archive, step, step, batch)
        return {**metrics, **ages}

    def save(self) -> None:
        self._trainer.save(self._checkpoints)

    def publish(self, keep_from: int) -> Callable[[], dict[str, Any]]:
        """Copy the present weights, so that the next train step may change them.

        The function that it returns waits until they are published, drops versions below `keep_from`, and
        returns version, bytes and unchanged (whether no weight is new). Either raises `RpcError`
        `publication_failed` when the store does not take them.
        """
        version = self.version
        weights = self._trainer.named_weights()
        failure = None
        if rank() == 0:
            try:
                pushed = self._publisher.push(version, weights)
            except Exception as error:
                failure = _publication_failure(version, error)
        # Gathering the tensors is collective, so every rank goes through all of them.
        for _ in weights:
            continue
        _agree("publication_failed", failure)

        def finish() -> dict[str, Any]:
            try:
                published = pushed.result()
                # The next version may be on its way to the store already.
                collect(self._weights, range(keep_from, version + 2))
            except Exception as error:
                raise RpcError("publication_failed", _publication_failure(version, error)) from error
            return {"version": version, "bytes": published.size, "unchanged": published.unchanged}

        return finish

    def _read(self, trajectories: list[tuple[str, int]]) -> list[Trajectory]:
        batch: list[Trajectory] = []
        failure = None
        try:
            batch = from_arrow_many(self._buffer.get_many(trajectories))
        except Exception as error:
            logger.exception("the batch cannot be read")
            failure = f"{type(error).__name__}: {error}"
        _agree("unreadable_batch", failure)
        return batch


def _publication_failure(version: int, error: Exception) -> str:
    logger.error("version %d was not published", version, exc_info=error)
    return f"version {version}: {type(error).__name__}: {error}"


def _agree(code: str, failure: str | None) -> None:
    """Raise `RpcError` on every rank when one failed, so that all of them go on alike. Collective."""
    for index, found in enumerate(gather_json(failure)):
        if found is not None:
            raise RpcError(code, found if index == 0 else f"rank {index}: {found}")


def trainer_server(run: Callable[[str, Any], Awaitable[Any]], settings: dict[str, Any]) -> RpcServer:
    """The trainer's calls, each of which is `run` as a command."""

    def handler(command: str) -> Handler:
        async def call(payload: Any, _: RpcConnection) -> Any:
            started = now()
            result = await run(command, payload)
            if callable(result):
                result = await asyncio.to_thread(result)
            return {**result, "train/seconds": now() - started} if command == "train_step" else result

        return call

    commands = ("train_step", "save_checkpoint", "publish_weights")
    return RpcServer({command: handler(command) for command in commands}, token=settings.get("token"))


async def serve_trainer(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Settings: those of `TrainerService.of`, token, and optionally host and port."""
    if Campaign.parse(settings["campaign"]).train.trainer.processes > 1:
        from tasks.train.launch import run_ranks

        await run_ranks(settings)
        return
    # One thread does all the work, one command at a time; the event loop stays free to answer meanwhile.
    worker = ThreadPoolExecutor(1, "trainer")
    loop = asyncio.get_running_loop()
    service = await loop.run_in_executor(worker, TrainerService.of, settings)

    async def run(command: str, payload: Any) -> Any:
        return await loop.run_in_executor(worker, service.execute, command, payload)

    server = trainer_server(run, settings)
    url = await server.start(settings.get("host", "127.0.0.1"), settings.get("port", 0))
    ready({"url": url, "version": service.version})
    await asyncio.Event().wait()


if __name__ == "__main__":
    from infra.processes import serve

    logging.basicConfig(level=logging.INFO)
    serve(serve_trainer)
