"""The training loop on benchmark campaigns, with and without Prefect."""

import itertools
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.async_train import async_train
from flows.preparation import open_run, prepare_model
from tasks.campaign import Campaign
from tasks.open_session import open_session
from tasks.report.run_files import RunFiles, Span
from tasks.run_folder import RunFolder
from tasks.train.loop import directly, train_loop

WARM_UP_STEPS = 3
_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Runs lie in memory: ext4 is ten times slower to create files for minutes after others were removed, so a
run would pay for the clean-up of the one before it."""


@dataclass(frozen=True, slots=True)
class LoopTimes:
    """Steps after the warm-up."""

    step_seconds: list[float]
    trajectories_per_step: int

    @property
    def median_step(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def total_seconds(self) -> float:
        return sum(self.step_seconds)

    @property
    def trajectories_per_second(self) -> float:
        return self.trajectories_per_step / self.median_step


@dataclass(frozen=True, slots=True)
class LoopRecord:
    """What a run wrote of itself."""

    metrics: list[dict[str, Any]]  # a row a step
    spans: list[Span]

    def step_seconds(self, warm_up: int) -> list[float]:
        """From one step's end to the next, after the first `warm_up` steps."""
        ends = [float(row["time"]) for row in self.metrics]
        return [after - before for before, after in itertools.pairwise(ends)][warm_up - 1 :]

    def stage_seconds(self, stage: str, warm_up: int) -> list[float]:
        """Of every span of a stage, of steps from `warm_up` on."""
        return [span.seconds for span in self.spans if span.stage == stage and span.step >= warm_up]


async def run_loop(campaign: Campaign, *, prefect: bool = False) -> LoopTimes:
    """Train the campaign's steps in a folder of its own, and time the steps after the warm-up."""
    record = await record_loop(campaign, prefect=prefect)
    return LoopTimes(record.step_seconds(WARM_UP_STEPS), int(record.metrics[-1]["trajectories"]))


async def record_loop(campaign: Campaign, *, prefect: bool = False) -> LoopRecord:
    """Train the campaign's steps in a folder of its own; returns what the run recorded."""
    with tempfile.TemporaryDirectory(dir=_MEMORY) as runs:
        campaign = campaign.model_copy(update={"stores": campaign.stores.model_copy(update={"runs": runs})})
        if prefect:
            await async_train(campaign, "bench")
            folder = RunFolder.of(campaign, "bench")
        else:
            folder = open_run(campaign, "bench")
            await prepare_model.fn(campaign, folder)
            async with open_session(campaign, folder) as session:
                await train_loop(session, directly(session))
        files = RunFiles(folder.root)
        return LoopRecord(files.read_metrics(), files.read_spans())


def sums(model: Path, *, steps: int, **train: Any) -> Campaign:
    """Single-digit sums, 8 groups of 8, 8 new tokens: what TRL is given."""
    domain = {"source": "tests.bench.domains:Sums", "max_turns": 1, "max_turn_tokens": 8, "max_tokens": 32}
    return _campaign(model, {"sums": domain}, steps, **train)


def slow_turns(model: Path, *, steps: int, turns: int, latency_ms: float, **train: Any) -> Campaign:
    """Several turns of 4 tokens against an environment that takes its time."""
    domain = {
        "source": "tests.bench.domains:SlowTurns",
        "options": {"turns": turns, "latency_ms": latency_ms},
        "max_turns": turns,
        "max_turn_tokens": 4,
        "max_tokens": 96,
    }
    return _campaign(model, {"slow_turns": domain}, steps, **train)


def _campaign(model: Path, domains: dict[str, Any], steps: int, **train: Any) -> Campaign:
    return bench_campaign(model, domains, train={"steps": steps, **train})


def bench_campaign(
    model: Path, domains: dict[str, Any], *, train: dict[str, Any], **sections: Any
) -> Campaign:
    """8 groups of 8 a step without checkpoints, unless `train` says otherwise."""
    return Campaign.parse(
        {
            "name": "bench",
            "model": {"path": str(model)},
            "domains": domains,
            "stores": {"evict_samples": False},
            "train": {
                "groups": 8,
                "group_size": 8,
                "algorithm": {"kind": "grpo", "zero_variance": "keep"},
                "checkpoint": {"every": 1_000_000},
                **train,
            },
            **sections,
        }
    )
