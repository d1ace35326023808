"""The trainer of a simulation: the service's commands, each as long as the performance model says.

It reads the batch that the manifest names from the sample buffer, as the real one does: the time of a step
follows from the lengths of these very trajectories, the ages of their tokens from the stamps in them.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from blocks.sample_buffer import SampleBuffer
from infra.performance.training import TrainingModel
from infra.rpc import RpcError
from tasks.simulation.cluster import TrainSpec
from tasks.simulation.machine import Machines
from tasks.simulation.weights import SimulatedWeights
from tasks.train.config import TrainConfig
from tasks.train.token_ages import age_metrics
from tasks.trajectory_arrow import from_arrow_many


class SimulatedTrainer:
    def __init__(
        self,
        model: TrainingModel,
        spec: TrainSpec,
        config: TrainConfig,
        buffer: SampleBuffer,
        weights: SimulatedWeights,
        machines: Machines,
    ):
        self._model = model
        self._spec = spec
        self._config = config
        self._buffer = buffer
        self._weights = weights
        self._machines = machines
        self.version = 0
        self.busy_seconds = 0.0
        """In which its devices worked on a train step, moving its state in and out included."""

    async def run(self, command: str, payload: Any) -> Any:
        """A command of `tasks.train.service`. Raises `RpcError` as that does."""
        match command:
            case "train_step":
                return await self._train(payload["step"], payload["trajectories"])
            case "save_checkpoint":
                await asyncio.sleep(self.checkpoint_seconds)
                return None
            case "publish_weights":
                version = self.version
                await self._weights.push(version)
                return {"version": version, "bytes": self._weights.size, "unchanged": False}
        raise RpcError("unknown_method", command)

    @property
    def checkpoint_seconds(self) -> float:
        """For which the trainer waits while a checkpoint is written."""
        rate = self._spec.checkpoint_gb_s
        return self._model.size.checkpoint_bytes / (self._spec.devices * rate * 1e9) if rate else 0.0

    @property
    def switch_seconds(self) -> float:
        """Of a colocated trainer: to bring its state in before a step, and the same again to put it away.

        Its share of weights, gradients and optimiser state crosses each device's link to the host.
        """
        if not self._spec.colocated:
            return 0.0
        return self._model.size.state_bytes / (self._spec.devices * self._spec.host_gb_s * 1e9)

    def step_seconds(self, lengths: Sequence[int]) -> float:
        """Of the optimiser steps on a batch, and what goes before them.

        With several mini-batches the proximal policy is computed first, with a KL term the reference: a
        forward pass over the batch each.
        """
        mini_batches = self._config.trainer.mini_batches
        size = -(-len(lengths) // mini_batches)
        parts = [lengths[start : start + size] for start in range(0, len(lengths), size)]
        forwards = (mini_batches > 1) + (self._config.algorithm.kl_coefficient > 0)
        steps = sum(self._model.step_seconds(part) for part in parts)
        return steps + forwards * self._model.forward_seconds(lengths)

    async def _train(self, step: int, names: Sequence[tuple[str, int]]) -> dict[str, Any]:
        if step != self.version:
            raise RpcError(
                "wrong_step", f"asked to train step {step} on the weights of version {self.version}"
            )
        batch = from_arrow_many(self._buffer.get_many([(name, version) for name, version in names]))
        try:
            ages = age_metrics(step, batch)
        except ValueError as error:
            raise RpcError("impossible_stamps", str(error)) from None
        lengths = [len(segment.tokens) for trajectory in batch for segment in trajectory.segments()]
        tokens = sum(trajectory.sampled_tokens for trajectory in batch)
        trajectories = len(batch)
        del batch  # long arrays, of which nobody needs to keep hold while the step goes on
        seconds = 2 * self.switch_seconds + self.step_seconds(lengths)
        await self._machines.step_begins()
        await self._machines.trainer_clock.sleep(seconds)
        self.busy_seconds += seconds
        self.version += 1
        return {
            "train/tokens": tokens,
            "train/sequences": len(lengths),
            "train/trajectories": trajectories,
            **ages,
        }
