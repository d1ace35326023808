"""How long generation stands still for new weights, over the whole time that these take to travel.

    python -m tests.bench.exposed_update [--model DIRECTORY] [--steps N]

A run's own spans: `publish` (push) and `pull` go on beside generation, `suspend`, `update` and `resume` stop
it. The model is SmolLM2-135M where it has been exported, or a random Llama of 44 million parameters.
"""

import argparse
import asyncio
import math
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open

from tasks.campaign import Campaign
from tasks.report.run_files import Span
from tests.bench import small_llama
from tests.bench.loops import bench_campaign, record_loop
from tests.bench.rows import Row, at_most, table

TARGET = 0.1
WARM_UP = 1
STOPS, TRAVELS = ("suspend", "update", "resume"), ("publish", "pull", "update")
BIG = small_llama.Shape(hidden=576, intermediate=1536, layers=11, heads=9, context=512)


def campaign(model: Path, steps: int) -> Campaign:
    domain = {
        "source": "tests.bench.domains:SlowTurns",
        "options": {"turns": 4, "latency_ms": 50.0},
        "max_turns": 4,
        "max_turn_tokens": 4,
        "max_tokens": 192,
    }
    return bench_campaign(
        model,
        {"slow_turns": domain},
        train={"steps": steps + WARM_UP, "groups": 2, "group_size": 4, "mode": "tutti", "alpha": 1},
        rollout={"engine": {"kind": "torch", "max_running": 16, "max_sessions": 32}},
        weights={"dtype": "bfloat16"},
    )


def exposed_and_whole(spans: Iterable[Span], step: int) -> tuple[float, float]:
    """Seconds in which the version made by train step `step` stopped generation, and in which it travelled.

    A version is published in the step that makes it and taken by the engines before the step after it.
    """
    seconds = {(span.stage, span.step): span.seconds for span in spans}
    exposed = sum(seconds[stage, step + 1] for stage in STOPS)
    whole = sum(seconds[stage, step + (stage == "update")] for stage in TRAVELS)
    return exposed, whole


def parameters(model: Path) -> int:
    """Elements of the tensors in a model directory's files."""
    count = 0
    for file in model.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return count


async def row(model: Path | None = None, steps: int = 4) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            small_llama.build(folder, shape=BIG)
        model = model or Path(folder)
        size = 2 * parameters(model)
        record = await record_loop(campaign(model, steps))
    versions = [exposed_and_whole(record.spans, step) for step in range(WARM_UP, steps)]
    exposed, whole = (statistics.median(side) for side in zip(*versions, strict=True))
    return at_most(
        "weight update exposed : whole push and pull, s",
        exposed,
        whole,
        TARGET,
        f"{size / 1e6:.0f} MB in bfloat16 a version, torch engine, mode tutti; suspend, update and resume "
        f"over publish, pull and update; medians of {len(versions)} versions",
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    print(table([asyncio.run(row(arguments.model, arguments.steps))]))


if __name__ == "__main__":
    main()
