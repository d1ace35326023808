"""The cases that the sharded trainer and one process are compared in."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tasks.train.algorithms.grpo import Grpo
from tasks.train.config import GrpoConfig, LoraConfig, TorchTrainerConfig
from tasks.train.sequences import PreparedBatch
from tasks.train.trainers.torch import TorchTrainer
from tests.train.trainers.batches import random_trajectories

ALGORITHM = GrpoConfig(kl_coefficient=0.1, entropy_coefficient=0.01, aggregation="sequence_mean_token_mean")


def batch(seed: int) -> PreparedBatch:
    return Grpo(ALGORITHM).prepare(random_trajectories(seed))


def masked() -> PreparedBatch:
    """Sequences of which no token is trained."""
    return PreparedBatch(
        [replace(sequence, loss_mask=np.zeros_like(sequence.loss_mask)) for sequence in batch(0).sequences]
    )


def lonely() -> PreparedBatch:
    """One sequence: the other rank has nothing to do but keep step."""
    return PreparedBatch(batch(0).sequences[:1])


@dataclass(frozen=True)
class Case:
    options: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[], PreparedBatch] = lambda: batch(0)


CASES = {
    "padded": Case({"micro_batch_tokens": 60}),
    "packed": Case({"micro_batch_tokens": 60, "packing": True}),
    "checkpointed": Case({"micro_batch_tokens": 60, "activation_checkpointing": True}),
    "lora": Case({"lora": LoraConfig(rank=3, targets=("q_proj", "up_proj"))}),
    "lonely": Case(batch=lonely),
    "masked": Case(batch=masked),
}


def trainer(folder: Path, **options: Any) -> TorchTrainer:
    return TorchTrainer(folder / "model", TorchTrainerConfig(**options), temperature=0.9)


def steps(trained: TorchTrainer, seeds: Iterable[int]) -> list[dict[str, float]]:
    """A train step on the batch of each seed; the metrics of each."""
    return [trained.train_step(batch(seed), Grpo(ALGORITHM)) for seed in seeds]
