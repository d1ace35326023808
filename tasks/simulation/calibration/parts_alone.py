"""What the embedded engine and the torch trainer compute by themselves, in this process: CPU seconds of
batches of known shape, which differ little between a busy machine and a quiet one."""

import asyncio
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tasks.campaign import Campaign
from tasks.rollout.config import TorchEngineConfig
from tasks.rollout.engines.base import GenerateRequest
from tasks.rollout.engines.service import EngineServiceSettings, WeightsLocation, make_engine
from tasks.train.algorithms import make_algorithm
from tasks.train.trainers import make_trainer
from tasks.trajectory import Trajectory

Work = tuple[float, float, float]
"""Iterations, tokens sampled, context tokens computed."""


@dataclass(frozen=True, slots=True)
class Shape:
    """So many requests at once, each of a context of its own."""

    requests: int
    context: int
    tokens: int


SHAPES = (
    Shape(1, 16, 96),
    Shape(6, 16, 64),
    Shape(24, 16, 48),
    Shape(64, 16, 32),
    Shape(64, 96, 2),
    Shape(16, 200, 2),
)
"""From a lone request to a full batch, and contexts that are nearly all of the work."""


async def measure_engine(
    model: Path, max_context: int, shapes: Sequence[Shape] = SHAPES, repeats: int = 2
) -> tuple[list[Work], list[float]]:
    """What was done for each shape, and the least CPU seconds that it took in `repeats` tries."""
    settings = EngineServiceSettings(
        model=model,
        weights=WeightsLocation(url="memory://engine-alone"),
        engine=TorchEngineConfig(),
        max_context=max_context,
    )
    work: list[Work] = []
    seconds: list[float] = []
    async with await asyncio.to_thread(make_engine, settings) as engine:

        async def run(shape: Shape, number: int) -> tuple[Work, float]:
            before, began = await engine.stats(), _cpu_seconds()
            await asyncio.gather(
                *(
                    engine.generate(
                        GenerateRequest(
                            session=f"{number}-{index}",
                            tokens=np.full(shape.context, 7, np.int32),
                            max_new_tokens=shape.tokens,
                            temperature=1.0,
                            seed=1000 * number + index,
                        )
                    )
                    for index in range(shape.requests)
                )
            )
            after, taken = await engine.stats(), _cpu_seconds() - began
            for index in range(shape.requests):
                await engine.end_session(f"{number}-{index}")
            done = (
                float(after.steps - before.steps),
                float(after.decode_tokens - before.decode_tokens),
                float(after.prefill_tokens - before.prefill_tokens),
            )
            return done, taken

        await run(shapes[0], 0)  # what is made at the first use
        for number, shape in enumerate(shapes, start=1):
            tries = [await run(shape, 100 * number + repeat) for repeat in range(repeats)]
            done, taken = min(tries, key=lambda each: each[1] / max(sum(each[0]), 1.0))
            work.append(done)
            seconds.append(taken)
    return work, seconds


def measure_trainer(
    campaign: Campaign, model: Path, batches: Sequence[Sequence[Trajectory]], repeats: int = 2
) -> list[tuple[list[int], float]]:
    """Lengths of each batch, and the least CPU seconds that a train step on it took in `repeats` tries."""
    algorithm = make_algorithm(campaign.train.algorithm)
    trainer = make_trainer(
        campaign.train.trainer,
        model,
        temperature=campaign.rollout.temperature,
        seed=campaign.seed,
        steps=campaign.train.steps,
    )
    found = []
    for index, batch in enumerate([batches[0], *batches]):  # the first makes what is made at the first use
        segments = [segment for trajectory in batch for segment in trajectory.segments()]
        taken = []
        for _ in range(repeats):
            began = _cpu_seconds()
            trainer.train_step(algorithm.prepare(segments), algorithm)
            taken.append(_cpu_seconds() - began)
        if index:
            found.append(([len(segment.tokens) for segment in segments], min(taken)))
    return found


_PRODUCTS = """
import torch
torch.set_num_threads(1)
factor = torch.ones(192, 192)
print("ready", flush=True)
while True:
    factor @ factor
"""


def measure_sharing(cores: int, repeats: int = 3) -> float:
    """Pace of a process that multiplies small matrices while one on each other core does so too, over its
    pace alone: CPU seconds, the least of `repeats` tries each. No more than 1."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = min(_products_seconds() for _ in range(repeats))
    others = [
        subprocess.Popen([sys.executable, "-c", _PRODUCTS], stdout=subprocess.PIPE) for _ in range(cores - 1)
    ]
    try:
        for other in others:
            assert other.stdout is not None
            other.stdout.readline()
        beside = min(_products_seconds() for _ in range(repeats))
    finally:
        for other in others:
            other.kill()
            other.communicate()
        torch.set_num_threads(threads)
    return min(alone / beside, 1.0)


def _products_seconds(products: int = 1500) -> float:
    factor = torch.ones(192, 192)
    began = _cpu_seconds()
    for _ in range(products):
        factor @ factor
    return _cpu_seconds() - began


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
