"""Rewards on a dedicated worker against rewards on a function service, the same campaign: RollArt's R3.

    python -m tests.bench.reward_utilisation [--steps N] [--engines K] [--idle-s S] [--out FILE]

RollArt (§7.3, three math jobs of 8B/16k, batches of 84): dedicated reward GPUs were 5.8 % utilised, functions
88 %; with their GPUs given to rollout, 8 instead of 4, rollout fell from 158 to 77 s. Here K engines and a
dedicated reward worker are set against K + 1 engines with rewards on Lithops' `localhost`. The verifier and
its processes are real, and so is the control plane; the engines' durations are injected, since more engines
on the cores of one machine would only take them from each other.

A service keeps a container warm without billing it. `localhost` has none to keep: an activation that stays
(`--idle-s` above the time between two steps' rewards) stands for a warm container, and what a service would
bill are its seconds with rewards; one that ends with its batch pays seconds for the next one's start.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.campaign import Campaign
from tests.bench import small_llama
from tests.bench.loops import bench_campaign, record_loop
from tests.bench.rows import Row, at_least, at_most, table

PAPER_DEDICATED, PAPER_FUNCTIONS, PAPER_ROLLOUT = 0.058, 0.88, 158 / 77
GROUPS, GROUP_SIZE, WARM_UP = 12, 8, 2
TURN_TOKENS, DECODE_S, RUNNING = 48, 0.02, 12


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians over the steps after the warm-up."""

    engines: int
    rewards: str
    rollout_seconds: float
    step_seconds: float
    utilisation: float
    """Of the dedicated worker: computed over wall time. Of functions: with rewards over activations' life."""
    busy_seconds: float
    """A step: that the dedicated worker computed, or that functions had rewards to judge."""
    latency_p50: float
    latency_p99: float
    cold_starts: float  # in all


def campaign(model: Path, steps: int, engines: int, idle_s: float | None) -> Campaign:
    """Rewards are on functions with an idle time, and else on a dedicated worker."""
    domain = {
        "source": "tests.bench.gold_sums:GoldSums",
        "reward": "math",
        "max_turns": 1,
        "max_turn_tokens": TURN_TOKENS,
        "max_tokens": TURN_TOKENS + 16,
    }
    serverless = {"backend": "localhost", "activations": 1, "idle_s": idle_s}
    return bench_campaign(
        model,
        {"sums": domain},
        train={
            "steps": steps + WARM_UP,
            "groups": GROUPS,
            "group_size": GROUP_SIZE,
            "mode": "sync_plus",
            "alpha": 0,
            "trainer": {"micro_batch_tokens": 8192},
        },
        rollout={
            "engine": {
                "kind": "simulated",
                "workers": engines,
                "decode_s": DECODE_S,
                "end_probability": 0.02,
                "max_running": RUNNING,
            }
        },
        reward={"workers": 1, "serverless": None if idle_s is None else serverless},
    )


async def measure(model: Path, steps: int, engines: int, idle_s: float | None = None) -> Measured:
    functions = idle_s is not None
    record = await record_loop(campaign(model, steps, engines, idle_s))
    rows = record.metrics[WARM_UP:]

    def middle(name: str) -> float:
        return statistics.median(float(row.get(name, 0.0)) for row in rows)

    return Measured(
        engines=engines,
        rewards="functions" if functions else "dedicated",
        rollout_seconds=statistics.median(record.stage_seconds("get_batch", WARM_UP)),
        step_seconds=middle("seconds/step"),
        utilisation=middle("reward/function_utilisation" if functions else "reward/utilisation"),
        busy_seconds=middle("reward/function_busy_seconds" if functions else "reward/busy_seconds"),
        latency_p50=middle("reward/latency_p50"),
        latency_p99=middle("reward/latency_p99"),
        cold_starts=sum(float(row.get("reward/cold_starts", 0.0)) for row in record.metrics),
    )


def rows_of(dedicated: Measured, functions: Measured) -> list[Row]:
    how = (
        f"{GROUPS} x {GROUP_SIZE} answers of up to {TURN_TOKENS} tokens, engines of {RUNNING} at "
        f"{DECODE_S:g} s a token (injected), Math-Verify for real; medians of the "
        "steps after the warm-up, mode sync_plus. "
    )
    return [
        at_most(
            "a dedicated reward worker: seconds computed : seconds held",
            dedicated.utilisation,
            1.0,
            0.5,
            f"{how}RollArt: {PAPER_DEDICATED:.1%}, with functions {PAPER_FUNCTIONS:.0%}; ours with these: "
            f"{functions.busy_seconds:.2g} s with rewards in a step of {functions.step_seconds:.2g} s",
        ),
        at_least(
            f"rollouts/s: {functions.engines} engines + functions : {dedicated.engines} + a reward worker",
            1 / functions.rollout_seconds,
            1 / dedicated.rollout_seconds,
            0.8 * functions.engines / dedicated.engines,
            f"{how}RollArt: {PAPER_ROLLOUT:.2f} with twice the engines; the worker's core runs an engine",
        ),
    ]


async def measured(steps: int, engines: int, idle_s: float = 60.0) -> tuple[Measured, Measured]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        small_llama.build(model, shape=small_llama.TINY)
        dedicated = await measure(model, steps, engines)
        functions = await measure(model, steps, engines + 1, idle_s)
    return dedicated, functions


async def rows(steps: int = 6, engines: int = 1) -> list[Row]:
    """For `make bench`. Without Lithops there are none."""
    from tasks.reward.config import known_backends

    return rows_of(*await measured(steps, engines)) if known_backends() else []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--idle-s", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    arguments: Any = parser.parse_args()
    found = asyncio.run(measured(arguments.steps, arguments.engines, arguments.idle_s))
    for one in found:
        print(json.dumps(asdict(one)))
    print(table(rows_of(*found)))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps([asdict(one) for one in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
