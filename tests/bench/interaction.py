"""Trajectory-level against batch-level interaction: modes `sync_plus` and `sync` on the very same work.

    python -m tests.bench.interaction [--sigmas S ...] [--steps N] [--groups N] [--turns N] [--mean-ms M]

Every turn's environment takes N(m, sigma), as in RollArt's ablation of trajectory-level rollout (R2). The
engine's durations are injected and everything else is real, so that the ratio is not one of two cores.
Turns vary in length as a policy's do, and batch-level interaction waits for the longest of each round too: by
Monte Carlo the waits of the default work alone give 1.20, 1.56, 1.86, 2.09 and 2.40, with its turns 1.53,
1.85, 2.09, 2.32 and 2.55.
"""

import argparse
import asyncio
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tasks.campaign import Campaign
from tests.bench import small_llama
from tests.bench.loops import bench_campaign, record_loop
from tests.bench.rows import Row, at_least, table

TARGETS = {0.1: 1.23, 0.3: 1.51, 0.5: 1.69, 0.7: 2.18, 1.0: 2.27}
"""By sigma / m: RollArt's ratios, of 8B/32k, N(10 s, sigma) and 10 iterations."""
GROUP_SIZE, WARM_UP = 8, 1
DECODE_S, END_PROBABILITY, TURN_TOKENS = 0.004, 0.2, 24


@dataclass(frozen=True, slots=True)
class Work:
    """Groups of 8, `turns` turns each, `mean_ms` a turn."""

    steps: int = 2
    groups: int = 16
    turns: int = 30
    mean_ms: float = 150.0

    def campaign(self, model: Path, mode: str, sigma: float) -> Campaign:
        domain = {
            "source": "tests.bench.latency_domains:NoisyTurns",
            "options": {"turns": self.turns, "mean_ms": self.mean_ms, "sigma_ms": sigma * self.mean_ms},
            "max_turns": self.turns,
            "max_turn_tokens": TURN_TOKENS,
            "max_tokens": 32 * self.turns,
            "step_limit_s": 60.0,
        }
        trajectories = self.groups * GROUP_SIZE
        return bench_campaign(
            model,
            {"noisy": domain},
            train={
                "steps": self.steps + WARM_UP,
                "groups": self.groups,
                "group_size": GROUP_SIZE,
                "mode": mode,
                "alpha": 0,
                "trainer": {"micro_batch_tokens": 16384},
            },
            rollout={
                "engine": {
                    "kind": "simulated",
                    "decode_s": DECODE_S,
                    "end_probability": END_PROBABILITY,
                    "max_running": trajectories,
                    "max_sessions": 2 * trajectories,
                }
            },
            environment={"concurrent_trajectories": 2 * trajectories},
        )

    async def rollout_seconds(self, model: Path, mode: str, sigma: float) -> list[float]:
        """From the beginning of a batch until it is complete, of each step after the warm-up."""
        record = await record_loop(self.campaign(model, mode, sigma))
        return record.stage_seconds("get_batch", WARM_UP)

    async def row(self, model: Path, sigma: float) -> Row:
        trajectory_level = await self.rollout_seconds(model, "sync_plus", sigma)
        batch_level = await self.rollout_seconds(model, "sync", sigma)
        return at_least(
            f"trajectory-level : batch-level interaction, rollouts/s, sigma/m {sigma}",
            1 / statistics.median(trajectory_level),
            1 / statistics.median(batch_level),
            TARGETS[sigma],
            f"{self.groups * GROUP_SIZE} trajectories of {self.turns} turns, N({self.mean_ms:g} ms, "
            f"{sigma * self.mean_ms:g} ms) each; simulated engine, {1000 * DECODE_S:g} ms a token, turns of "
            f"geometric length, mean {1 / END_PROBABILITY:g} tokens, at most {TURN_TOKENS}; from the batch's "
            f"beginning to its last trajectory, medians of {self.steps} steps",
        )


async def rows(work: Work, sigmas: list[float]) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        small_llama.build(folder, shape=small_llama.TINY)
        return [await work.row(Path(folder), sigma) for sigma in sigmas]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sigmas", type=float, nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--steps", type=int, default=Work().steps)
    parser.add_argument("--groups", type=int, default=Work().groups)
    parser.add_argument("--turns", type=int, default=Work().turns)
    parser.add_argument("--mean-ms", type=float, default=Work().mean_ms)
    arguments = parser.parse_args()
    work = Work(arguments.steps, arguments.groups, arguments.turns, arguments.mean_ms)
    print(table(asyncio.run(rows(work, arguments.sigmas))))


if __name__ == "__main__":
    main()
