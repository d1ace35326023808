"""The trainer's tokens/s against a bare forward, backward and AdamW loop on the same padded micro-batches.

    python -m tests.bench.trainer_speed MODEL_DIRECTORY

prints one JSON line. The two take turns, step by step, so that the machine's drift hits both alike.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tasks.train.algorithms import make_algorithm
from tasks.train.config import GrpoConfig, TorchTrainerConfig
from tasks.train.micro_batches import cut_micro_batches
from tasks.train.trainers.torch import TorchTrainer
from tasks.trajectory import NOT_GENERATED, Reward, StopReason, Trajectory, TrajectoryKey, Turn

STEPS, WARM_UP = 24, 4


def batch(seed: int) -> list[Trajectory]:
    """8 groups of 8 trajectories of 13 to 64 tokens, a third of them sampled, rewards at random."""
    draw = np.random.default_rng(seed)
    trajectories = []
    for group in range(8):
        for member in range(8):
            length = int(draw.integers(13, 65))
            mask = np.arange(length) >= length * 2 // 3
            trajectories.append(
                Trajectory(
                    key=TrajectoryKey(group, member),
                    domain="bench",
                    seed=group,
                    initiating_version=0,
                    tokens=draw.integers(5, 100, length).astype(np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask, -4.6, 0.0).astype(np.float32),
                    versions=np.where(mask, 0, NOT_GENERATED).astype(np.int32),
                    turns=[Turn(length * 2 // 3, length, StopReason.STOP, "")],
                    stop=StopReason.TERMINATED,
                    outcome=Reward(float(member % 2)),
                )
            )
    return trajectories


def measure(directory: Path) -> dict[str, float]:
    """Median seconds of a step of each, over the same batches."""
    config = TorchTrainerConfig()
    trainer = TorchTrainer(directory, config, temperature=1.0)
    algorithm = make_algorithm(GrpoConfig(zero_variance="keep"))
    bare = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=config.learning_rate, fused=True)
    ours, reference, tokens = [], [], 0
    for step in range(STEPS):
        trajectories = batch(step)
        tokens = sum(len(trajectory.tokens) for trajectory in trajectories)
        started = time.perf_counter()
        trainer.train_step(algorithm.prepare(trajectories), algorithm)
        ours.append(time.perf_counter() - started)
        micro_batches = padded(trajectories, config.micro_batch_tokens)
        started = time.perf_counter()
        optimizer.zero_grad()
        for ids in micro_batches:
            logits = bare(ids).logits[:, :-1].float()
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        reference.append(time.perf_counter() - started)
    return {
        "ours": tokens / statistics.median(ours[WARM_UP:]),
        "reference": tokens / statistics.median(reference[WARM_UP:]),
    }


def padded(trajectories: list[Trajectory], micro_batch_tokens: int) -> list[torch.Tensor]:
    """The micro-batches that the trainer cuts of the same trajectories, as (B, T) token ids."""
    rows = [torch.from_numpy(trajectory.tokens).long() for trajectory in trajectories]
    cuts = cut_micro_batches([len(row) for row in rows], micro_batch_tokens)
    return [torch.nn.utils.rnn.pad_sequence([rows[index] for index in cut], batch_first=True) for cut in cuts]


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
