"""What each rank does for `test_trainer`; rank 0 writes what it saw.

    torchrun --nproc-per-node 2 -m tests.train.trainers.megatron.scenarios MODELS FOLDER

Each scenario returns JSON values. They share one start, since that is most of their time.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed

from infra.object_store import ObjectStore
from tasks.train.algorithms.grpo import Grpo
from tasks.train.checkpoint import Checkpoints
from tasks.train.config import GrpoConfig, MegatronTrainerConfig
from tasks.train.process_group import gather_json
from tasks.train.sequences import PreparedBatch
from tasks.train.trainers.base import CheckpointMismatch
from tasks.train.trainers.megatron import MegatronTrainer
from tasks.train.trainers.megatron.logprobs import vocabulary_parallel_logprobs
from tests.train.trainers.batches import random_trajectories
from tests.train.trainers.megatron.families import VOCABULARY

Weights = dict[str, Tensor]
TRAINING: dict[str, Any] = {
    "mini_batches": 2,
    "micro_batch_tokens": 60,
    "learning_rate": 2e-3,
    "weight_decay": 0.1,
    "warm_up_steps": 2,
    "max_gradient_norm": 0.5,
}
SPLITS: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2": ("qwen2", {"tensor_parallel": 2, "distributed_optimizer": False}),
    "TP2 with sequence parallel": ("qwen3", {"tensor_parallel": 2, "sequence_parallel": True}),
    "PP2": ("llama", {"pipeline_parallel": 2}),
    "DP2": ("llama", {"data_parallel": 2}),
    "EP2": ("qwen3_moe", {"data_parallel": 2, "expert_parallel": 2}),
}


def training_algorithm() -> Grpo:
    return Grpo(
        GrpoConfig(kl_coefficient=0.1, kl_estimator="k3", entropy_coefficient=0.01, importance_cap=1.2)
    )


def training_batches(steps: int) -> list[PreparedBatch]:
    return [training_algorithm().prepare(random_trajectories(seed)) for seed in range(steps)]


class Scenarios:
    def __init__(self, models: Path, folder: Path):
        self._models = models
        self._folder = folder

    def trainer(self, family: str, **options: Any) -> MegatronTrainer:
        config = MegatronTrainerConfig.model_validate({**TRAINING, **options})
        return MegatronTrainer(self._models / family, config, temperature=0.8, steps=6)

    def checkpoints(self, name: str) -> Checkpoints:
        return Checkpoints(ObjectStore(str(self._folder / "checkpoints" / name)), keep=2)

    def logprobs(self) -> dict[str, Any]:
        """Seven tokens on two ranks: the last column of the second is padding."""
        generator = torch.Generator().manual_seed(0)
        logits_NV = 4 * torch.randn(5, 7, generator=generator, dtype=torch.float64)
        chosen_N = torch.tensor([0, 3, 4, 6, 2])
        weight_N, entropy_weight_N = torch.randn(2, 5, generator=generator, dtype=torch.float64)
        rank = distributed.get_rank()
        padded_NV = torch.cat([logits_NV, torch.full((5, 1), 50.0)], 1).float()
        mine_NV = padded_NV.chunk(2, 1)[rank].clone().requires_grad_()
        group = distributed.group.WORLD
        assert group is not None
        logprobs_N, entropy_N = vocabulary_parallel_logprobs(
            mine_NV, chosen_N, first=4 * rank, vocabulary=7, group=group
        )
        ((weight_N * logprobs_N).sum() + (entropy_weight_N * entropy_N).sum()).backward()
        assert mine_NV.grad is not None
        gradients = gather_json(mine_NV.grad.tolist())

        logits_NV.requires_grad_()
        expected_NV = torch.log_softmax(logits_NV, -1)
        expected_N = expected_NV.gather(1, chosen_N[:, None])[:, 0]
        expected_entropy_N = -(expected_NV.exp() * expected_NV).sum(-1)
        ((weight_N * expected_N).sum() + (entropy_weight_N * expected_entropy_N).sum()).backward()
        assert logits_NV.grad is not None
        gradient_NV = torch.cat([torch.tensor(part, dtype=torch.float64) for part in gradients], 1)
        return {
            "logprobs": _distance(logprobs_N, expected_N),
            "entropy": _distance(entropy_N, expected_entropy_N),
            "gradient": _distance(gradient_NV[:, :7], logits_NV.grad),
            "padding": gradient_NV[:, 7].tolist(),
        }

    def conversion(self) -> dict[str, Any]:
        """Every family, loaded and exported under every way to split it."""
        wrong = []
        for family, options in (
            ("llama", {"tensor_parallel": 2}),
            ("llama", {"pipeline_parallel": 2}),
            ("untied", {"pipeline_parallel": 2}),
            ("qwen2", {"tensor_parallel": 2}),
            ("qwen3", {"tensor_parallel": 2}),
            ("qwen3_moe", {"data_parallel": 2, "expert_parallel": 2}),
            ("qwen3_moe", {"tensor_parallel": 2, "sequence_parallel": True}),
        ):
            found = dict(self.trainer(family, **options).named_weights())
            if distributed.get_rank() == 0 and not _same(found, self._on_disk(family)):
                wrong.append([family, options])
        return {"wrong": wrong}

    def training(self) -> dict[str, Any]:
        """Two train steps of two optimiser steps each."""
        metrics = {}
        for split, (family, options) in SPLITS.items():
            trainer = self.trainer(family, **options)
            metrics[split] = [
                trainer.train_step(batch, training_algorithm()) for batch in training_batches(2)
            ]
            self._keep(split, trainer)
        return metrics

    def few_sequences(self) -> dict[str, Any]:
        """Fewer sequences than ranks can share evenly: one rank makes a pass that trains nothing."""
        [batch] = training_batches(1)
        few = PreparedBatch([max(batch.sequences, key=lambda sequence: len(sequence.tokens))])
        errors = {}
        for family, options in (
            ("llama", {}),
            ("qwen3_moe", {"expert_parallel": 2}),
        ):
            trainer = self.trainer(family, data_parallel=2, **options)
            loss, gradients = trainer.loss_and_gradients(few, training_algorithm())
            if distributed.get_rank() == 0:
                tensors = {**gradients, "loss": torch.tensor(loss)}
                save_file(
                    {name: tensor.clone() for name, tensor in tensors.items()}, self._file(f"few {family}")
                )
            errors[family] = trainer.loss_and_gradients(PreparedBatch([]), training_algorithm())[0]
        return errors

    def resume(self) -> dict[str, Any]:
        """Save after one step, restore into another trainer, and take two more in both."""
        outcomes = {}
        batches = training_batches(3)
        for name, family, options in (
            ("DP2 bfloat16", "llama", {"data_parallel": 2, "compute_dtype": "bfloat16"}),
            ("TP2 bfloat16", "qwen3", {"tensor_parallel": 2, "compute_dtype": "bfloat16"}),
            ("PP2", "llama", {"pipeline_parallel": 2}),
            ("EP2", "qwen3_moe", {"data_parallel": 2, "expert_parallel": 2}),
        ):
            checkpoints = self.checkpoints(name)
            unbroken = self.trainer(family, **options)
            found_nothing = not unbroken.restore(checkpoints)
            unbroken.train_step(batches[0], training_algorithm())
            unbroken.save(checkpoints)
            resumed = self.trainer(family, **options)
            restored = resumed.restore(checkpoints)
            both = [
                [trainer.train_step(batch, training_algorithm()) for batch in batches[1:]]
                for trainer in (unbroken, resumed)
            ]
            weights = [dict(trainer.named_weights()) for trainer in (unbroken, resumed)]
            outcomes[name] = {
                "found_nothing": found_nothing,
                "restored": restored,
                "version": resumed.version,
                "same_metrics": both[0] == both[1],
                "same_weights": _same(*weights),
            }
        return outcomes

    def reshard(self) -> dict[str, Any]:
        """A bfloat16 checkpoint of DP2 restored under TP2 and under PP2."""
        options = {"compute_dtype": "bfloat16"}
        first = self.trainer("llama", data_parallel=2, **options)
        first.train_step(training_batches(1)[0], training_algorithm())
        checkpoints, again = self.checkpoints("reshard"), self.checkpoints("again")
        first.save(checkpoints)
        saved = _saved(checkpoints)
        outcomes: dict[str, Any] = {
            "float32": {str(tensor.dtype) for tensor in saved.values()} == {"torch.float32"}
        }
        # Masters hold more than the bfloat16 weights do.
        outcomes["more_than_bfloat16"] = any(
            not torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values()
        )
        for split in ("tensor_parallel", "pipeline_parallel"):
            other = self.trainer("llama", **{split: 2}, **options)
            other.restore(checkpoints)
            other.save(again)
            outcomes[split] = [other.version, _same(_saved(again), saved)]
        metrics = other.train_step(training_batches(2)[1], training_algorithm())
        outcomes["trains_on"] = metrics["train/skipped_steps"] == 0
        return outcomes

    def mismatch(self) -> dict[str, Any]:
        checkpoints = self.checkpoints("mismatch")
        self.trainer("qwen2", tensor_parallel=2).save(checkpoints)
        other = self.trainer("qwen3", tensor_parallel=2)
        before = {name: tensor.clone() for name, tensor in other.named_weights()}
        try:
            other.restore(checkpoints)
        except CheckpointMismatch as error:
            return {"error": str(error), "unchanged": _same(before, dict(other.named_weights()))}
        return {"error": None}

    def small_steps(self) -> dict[str, Any]:
        """Steps below bfloat16's resolution add up in the float32 masters."""
        trainer = self.trainer(
            "llama", data_parallel=2, compute_dtype="bfloat16", learning_rate=1e-5, weight_decay=0.0
        )
        checkpoints = self.checkpoints("small")
        trainer.save(checkpoints)
        first = _saved(checkpoints)
        before = {name: tensor.clone() for name, tensor in trainer.named_weights()}
        for batch in training_batches(2):
            trainer.train_step(batch, training_algorithm())
        after = dict(trainer.named_weights())
        trainer.save(checkpoints)
        moved = _saved(checkpoints)
        if distributed.get_rank() != 0:
            return {}
        return {
            "starts_from_the_directory": _same(first, self._on_disk("llama")),
            "dtype": str(after["model.norm.weight"].dtype),
            "masters_moved": _moved(first, moved),
            "weights_moved": _moved(before, after),
            "rounded": _same({name: tensor.bfloat16() for name, tensor in moved.items()}, after),
        }

    def poisoned(self) -> dict[str, Any]:
        """One sequence with an infinite advantage; then a sound batch; then nothing."""
        [batch] = training_batches(1)
        first = batch.sequences[0]
        infinite = np.where(first.loss_mask, np.inf, 0).astype(np.float32)
        bad = PreparedBatch([replace(first, advantages=infinite), *batch.sequences[1:]])
        outcomes: dict[str, Any] = {}
        for split in ("tensor_parallel", "pipeline_parallel", "data_parallel"):
            trainer = self.trainer("llama", **{split: 2}, mini_batches=1)
            before = {name: tensor.clone() for name, tensor in trainer.named_weights()}
            metrics = trainer.train_step(bad, training_algorithm())
            unchanged = _same(before, dict(trainer.named_weights()))
            good = trainer.train_step(batch, training_algorithm())
            changed = not _same(before, dict(trainer.named_weights())) or distributed.get_rank() != 0
            empty = trainer.train_step(PreparedBatch([]), training_algorithm())
            outcomes[split] = {
                "skipped": [row["train/skipped_steps"] for row in (metrics, good, empty)],
                "gradient_norm": metrics["train/gradient_norm"],
                "unchanged": unchanged,
                "changed": changed,
                "version": trainer.version,
            }
        return outcomes

    def precision(self) -> dict[str, Any]:
        """Checkpointing changes no gradient; bfloat16 changes the loss little."""
        [batch] = training_batches(1)
        rows = {}
        for name, options in (
            ("plain", {}),
            ("checkpointing", {"activation_checkpointing": True}),
            ("bfloat16", {"compute_dtype": "bfloat16"}),
        ):
            trainer = self.trainer("llama", tensor_parallel=2, **options)
            loss, gradients = trainer.loss_and_gradients(batch, training_algorithm())
            norm = float(sum(gradient.double().square().sum() for gradient in gradients.values())) ** 0.5
            rows[name] = [loss, norm]
        return rows

    def _on_disk(self, family: str) -> Weights:
        return load_file(self._models / family / "model.safetensors")

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def _keep(self, name: str, trainer: MegatronTrainer) -> None:
        weights = {key: tensor.clone() for key, tensor in trainer.named_weights()}
        if distributed.get_rank() == 0:
            save_file(weights, self._file(name))


def _saved(checkpoints: Checkpoints) -> Weights:
    """The weights of the newest checkpoint."""
    parts = [part for part in checkpoints.parts() if part.startswith("weights/")]
    saved: Weights = {}
    for tensors in checkpoints.load(parts=parts).tensors.values():
        saved |= tensors
    return saved


def _same(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _moved(before: Weights, after: Weights) -> float:
    """The share of elements that differ."""
    changed = sum(int((before[name] != after[name]).sum()) for name in before)
    return changed / sum(tensor.numel() for tensor in before.values())


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max())


def main(models: Path, folder: Path) -> None:
    distributed.init_process_group("gloo")
    assert VOCABULARY % 2
    scenarios = Scenarios(models, folder)
    run: tuple[Callable[[], dict[str, Any]], ...] = (
        scenarios.logprobs,
        scenarios.conversion,
        scenarios.training,
        scenarios.few_sequences,
        scenarios.resume,
        scenarios.reshard,
        scenarios.mismatch,
        scenarios.small_steps,
        scenarios.poisoned,
        scenarios.precision,
    )
    for scenario in run:
        seen = scenario()
        if distributed.get_rank() == 0:
            (folder / f"{scenario.__name__}.json").write_text(json.dumps(seen))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
