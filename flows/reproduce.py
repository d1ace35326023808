"""What the papers claim beside what the simulator finds: `make reproduce`.

Each experiment is a task run and computes in a process of its own, so that several use several cores.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from flows.results import JSON
from tasks.simulation.rollart.claims import Row, table, write

EXPERIMENTS: dict[str, str] = {
    name: f"tasks.simulation.rollart.{name}"
    for name in (
        "breakdown",
        "modes",
        "scaling",
        "staleness",
        "redundancy",
        "affinity",
        "interaction",
        "serverless",
        "prefill_decode",
        "weights",
        "production",
    )
}
"""Module of each experiment, in the order in which they are shown. Each has `rows(quick) -> list[Row]`."""
SIDE_BY_SIDE: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=min(os.cpu_count() or 1, 4))
RESULT = Path("runs/reproduce.json")


def experiment_rows(name: str, quick: bool) -> list[Row]:
    """The rows of one experiment."""
    found: list[Row] = import_module(EXPERIMENTS[name]).rows(quick=quick)
    return found


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="{name}")
def experiment(name: str, quick: bool) -> list[Row]:
    """Run one experiment in a process of its own."""
    started = perf_counter()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        rows = process.submit(experiment_rows, name, quick).result()
    met = sum(row.met for row in rows)
    get_run_logger().info("%s: %d of %d rows, %.0f s", name, met, len(rows), perf_counter() - started)
    return rows


@flow(
    name="reproduce",
    log_prints=True,
    persist_result=False,
    result_serializer=JSON,
    task_runner=SIDE_BY_SIDE,
)
def reproduce(
    only: Sequence[str] = (), quick: bool = False, result: str = str(RESULT)
) -> list[dict[str, object]]:
    """Run all experiments, or `only` these; print their table and write it to `result`.

    `quick` takes smaller batches and fewer steps: seconds instead of minutes, and figures that are rougher.
    Raises ValueError for an experiment that does not exist.
    """
    chosen = known(only)
    futures = {name: experiment.submit(name, quick) for name in chosen}
    by_name = {name: future.result() for name, future in futures.items()}
    rows = [row for found in by_name.values() for row in found]
    for name, found in by_name.items():
        print(f"== {name}\n{table(found)}")
        create_table_artifact(
            [
                {
                    "claim": row.claim,
                    "condition": row.condition,
                    "published": row.published,
                    "ours": round(row.ours, 4),
                    "deviation": f"{row.deviation:+.1%}",
                    "note": row.note,
                }
                for row in found
            ],
            key=f"reproduce-{name.replace('_', '-')}",
        )
    write(rows, Path(result))
    print(f"{sum(row.met for row in rows)} of {len(rows)} rows within 10 %: {result}")
    return [row.plain() for row in rows]


def known(only: Sequence[str]) -> list[str]:
    """The experiments to run, in their order. Raises ValueError, naming all, for one that does not exist."""
    unknown = sorted(set(only) - EXPERIMENTS.keys())
    if unknown:
        raise ValueError(f"there is no experiment {', '.join(unknown)}; there are {', '.join(EXPERIMENTS)}")
    return [name for name in EXPERIMENTS if not only or name in only]


def main() -> int:
    """`python -m flows.reproduce [--only NAME ...] [--quick] [--result FILE]`"""
    parser = argparse.ArgumentParser(description="Reproduce what the papers claim, by simulation.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--quick", action="store_true", help="smaller batches and fewer steps")
    parser.add_argument("--result", default=str(RESULT), help="JSON file to write")
    arguments = parser.parse_args()
    try:
        known(arguments.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    reproduce(arguments.only, arguments.quick, arguments.result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
