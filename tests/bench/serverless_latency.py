"""`python -m tests.bench.serverless_latency`: cold and warm latency of rewards through Lithops' localhost.

Prints a line a figure; with --out writes them as JSON. The reward function itself takes microseconds, so this
is what the dispatch costs.
"""

import argparse
import asyncio
import json
import logging
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infra.clock import now
from tasks.reward.config import ServerlessConfig
from tasks.reward.serverless import ServerlessTraits
from tasks.reward.serverless_dispatch import ServerlessRewards
from tasks.trajectory import Reward

FUNCTION = "tests.reward.judgements:obey_remotely"


async def batch(rewards: ServerlessRewards, size: int, name: str) -> float:
    """Seconds until the last of `size` rewards asked at once is there."""
    began = now()
    fields = [
        ["d", 3, "p", [str(number)], ["o"], [0.0], "terminated", {"question": "x" * 500}]
        for number in range(size)
    ]
    outcomes = await asyncio.gather(*(rewards.score(FUNCTION, item, 10.0, name) for item in fields))
    assert outcomes == [Reward(float(number)) for number in range(size)]
    return now() - began


async def measure(size: int, cold: int, warm: int, *, stays: bool) -> dict[str, Any]:
    """Latencies in seconds of `cold` services' first batches and of `warm` later ones each.

    Without `stays` an activation ends with its batch, as on services that keep containers warm themselves.
    """
    first, later = [], []
    counts: dict[str, Any] = {}
    for repeat in range(cold):
        config = ServerlessConfig(backend="localhost", warm_workers=0, idle_s=None if stays else 0.0)
        rewards = ServerlessRewards(config, {FUNCTION: ServerlessTraits()})
        await rewards.start()
        try:
            first.append(await batch(rewards, size, f"{repeat}-first"))
            later += [await batch(rewards, size, f"{repeat}-{number}") for number in range(warm)]
        finally:
            await rewards.close()
        counts = asdict(rewards.counts)
    return {
        "rewards": size,
        "activations": "stay" if stays else "end with their batch",
        "first_p50_s": statistics.median(first),
        "first_max_s": max(first),
        "later_p50_s": statistics.median(later),
        "later_p95_s": statistics.quantiles(later, n=20)[-1],
        "later_batches": len(later),
        "counts_of_the_last": counts,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cold", type=int, default=3, help="services started for each figure")
    parser.add_argument("--warm", type=int, default=20, help="later batches on each of them")
    parser.add_argument("--out", type=Path)
    arguments: Any = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    figures = []
    for size, stays, warm in ((1, True, arguments.warm), (32, True, arguments.warm), (32, False, 2)):
        figures.append(asyncio.run(measure(size, arguments.cold, warm, stays=stays)))
        print(json.dumps({key: value for key, value in figures[-1].items() if key != "counts_of_the_last"}))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"serverless": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
