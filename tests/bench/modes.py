"""Step time of the modes on the same work: a heavy-tailed environment whose resets fail one time in ten.

    python -m tests.bench.modes [--steps N] [--repeats N] [--modes MODE ...]

The baselines are RollArt's (`tasks/train/modes.py`), which do without redundancy; `tutti` starts more groups
and members than a batch needs and cancels what is left. The engine's durations are injected, since two cores
would otherwise measure their own share-out; environments, rewards, stores and trainer are real.
"""

import argparse
import asyncio
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.campaign import Campaign
from tests.bench import small_llama
from tests.bench.loops import bench_campaign, record_loop
from tests.bench.rows import Row, at_least, table

TARGETS = {"sync_plus": 2.05, "one_off": 1.35, "areal": 1.31}
ALPHA = {"sync_plus": 0, "one_off": 1, "areal": 1, "tutti": 1}
REDUNDANCY = {"groups": 2, "members": 2}
TRAINED = small_llama.Shape(hidden=96, intermediate=256, layers=2, heads=4, context=512)
"""231 thousand parameters: on cores that it shares with all of the run, a larger trainer is the slowest part,
and then every mode that overlaps training takes as long as the trainer."""
WARM_UP = 2
GROUPS, GROUP_SIZE = 8, 8
TURNS, TURN_TOKENS, DECODE_S, END_PROBABILITY = 6, 16, 0.01, 0.15
HANG_S = 3.0
"""After which a reset that hangs has failed: about two episodes' time."""
ENVIRONMENT = {
    "turns": TURNS,
    "reset_ms": 150.0,
    "step_ms": 100.0,
    "sigma": 0.6,
    "hang_ms": 1000 * HANG_S,
    "failures": 0.1,
    "tails": 0.01,
}


@dataclass(frozen=True, slots=True)
class Work:
    steps: int = 6
    repeats: int = 2

    def campaign(self, model: Path, mode: str) -> Campaign:
        domain = {
            "source": "tests.bench.latency_domains:TroubledTurns",
            "options": ENVIRONMENT,
            "max_turns": TURNS,
            "max_turn_tokens": TURN_TOKENS,
            "max_tokens": 32 + TURNS * (TURN_TOKENS + 8),
            "reset_limit_s": 60.0,
            "step_limit_s": 60.0,
        }
        train: dict[str, Any] = {
            "steps": self.steps + WARM_UP,
            "groups": GROUPS,
            "group_size": GROUP_SIZE,
            "mode": mode,
            "alpha": ALPHA[mode],
        }
        if mode == "tutti":
            train["redundancy"] = REDUNDANCY
        return bench_campaign(
            model,
            {"troubled": domain},
            train=train,
            rollout={
                "engine": {
                    "kind": "simulated",
                    "decode_s": DECODE_S,
                    "end_probability": END_PROBABILITY,
                    "max_running": 512,
                    "max_sessions": 1024,
                }
            },
            environment={"concurrent_trajectories": 512, "hosts": 2},
        )

    async def step_seconds(self, model: Path, modes: list[str]) -> dict[str, list[float]]:
        """Steps after the warm-up of each mode, of runs that take turns."""
        seconds: dict[str, list[float]] = {mode: [] for mode in modes}
        for _ in range(self.repeats):
            for mode in modes:
                record = await record_loop(self.campaign(model, mode))
                seconds[mode] += record.step_seconds(WARM_UP)
        return seconds

    def how(self) -> str:
        return (
            f"{GROUPS} x {GROUP_SIZE} trajectories of {TURNS} turns, log-normal resets (150 ms) and steps "
            f"(100 ms, 1 % ten times as long), 1 reset in 10 fails, half of them after {HANG_S:g} s; "
            f"simulated engine, {1000 * DECODE_S:g} ms a token, 231k trainer; {self.steps} steps after "
            f"{WARM_UP}, {self.repeats} runs each in turns, median step"
        )


async def rows(work: Work, modes: list[str] | None = None) -> list[Row]:
    baselines = [mode for mode in TARGETS if modes is None or mode in modes]
    with tempfile.TemporaryDirectory() as folder:
        small_llama.build(folder, shape=TRAINED)
        seconds = await work.step_seconds(Path(folder), [*baselines, "tutti"])
    ours = statistics.median(seconds["tutti"])
    return [
        at_least(
            f"tutti : {mode}, steps/s",
            1 / ours,
            1 / statistics.median(seconds[mode]),
            TARGETS[mode],
            f"{work.how()}; tutti starts {REDUNDANCY['groups']} more groups and {REDUNDANCY['members']} "
            "more members of each",
        )
        for mode in baselines
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=Work().steps)
    parser.add_argument("--repeats", type=int, default=Work().repeats)
    parser.add_argument("--modes", nargs="+", choices=list(TARGETS), help="baselines to compare with")
    arguments = parser.parse_args()
    print(table(asyncio.run(rows(Work(arguments.steps, arguments.repeats), arguments.modes))))


if __name__ == "__main__":
    main()
