"""What a trainer is, and the names of what it measures.

A trainer is blind to the algorithm: it gets sequences with advantages and a loss to call.

Metrics of one train step. "Per token" is the mean over all the step's trained tokens.

| name | meaning |
|---|---|
| train/loss | loss, mean over mini-batches |
| train/gradient_norm | global L2 norm before clipping, mean over the optimiser steps taken; 0 when none was |
| train/entropy | entropy of the policy at the rollout temperature, nats per token |
| train/kl_behaviour | k3 estimate of KL(behaviour, proximal), nats per token: engine mismatch and staleness |
| train/kl_reference | estimate of KL(policy, reference) per token; only with a KL term |
| train/importance_mean | pi_proximal / pi_behaviour before truncation, per token |
| train/importance_max | the greatest of these ratios, before truncation |
| train/importance_truncated | fraction of tokens whose ratio was above the cap |
| train/clip_fraction | fraction of tokens whose gradient a clip bound removed |
| train/ratio_mean | pi_current / pi_proximal, per token; 1 with one mini-batch |
| train/learning_rate | of this step |
| train/tokens | trained (sampled) tokens |
| train/padded_tokens | tokens of the micro-batches, padding included, one pass counted |
| train/sequences | sequences trained |
| train/trajectories | trajectories in the batch, trained or not |
| train/groups | groups with at least one reward |
| train/zero_variance_groups | those of them whose rewards are all equal (or that have one member) |
| train/left_out_skip | trajectories left out: outcome `Skip` |
| train/left_out_infra_error | trajectories left out: outcome `InfraError` |
| train/left_out_non_finite | trajectories left out: a reward or log-probability is not finite |
| train/left_out_empty | trajectories left out: nothing was sampled |
| train/skipped_steps | optimiser steps not taken: gradient not finite, or nothing to train |
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from tasks.train.algorithms.base import Algorithm
from tasks.train.checkpoint import Checkpoints
from tasks.train.sequences import PreparedBatch


class CheckpointMismatch(ValueError):
    """A checkpoint of another model or optimiser. The message names the tensors that differ."""


class PolicyTrainer(Protocol):
    """Owns the policy's weights. `version` is the number of train steps done.

    In a trainer of several processes every method is collective: each rank calls it, in the same order and
    with the same arguments, and rank 0's return value counts.
    """

    version: int

    def train_step(self, batch: PreparedBatch, algorithm: Algorithm) -> dict[str, float]:
        """One train step: `version` rises by one, whatever the batch held. Returns the metrics above."""

    def loss_and_gradients(
        self, batch: PreparedBatch, algorithm: Algorithm
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss of the whole batch as one optimiser step, and its gradient, unclipped, by Hugging Face name.

        Gradients are full float32 tensors on the CPU, of tied parameters under the first name. Changes
        nothing in the trainer.
        """

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights by Hugging Face name, tied ones once. They are live: copy before the next train step.

        In a trainer of several processes every rank iterates to the end; full tensors come one at a time.
        """

    def save(self, checkpoints: Checkpoints) -> None:
        """Write the whole state as the checkpoint of `version`."""

    def restore(self, checkpoints: Checkpoints) -> bool:
        """Continue bit for bit from the newest complete checkpoint; False when there is none.

        Raises `CheckpointMismatch`, `CorruptCheckpoint`.
        """
