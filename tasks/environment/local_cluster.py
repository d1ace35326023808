"""A Dask cluster of one machine: in the campaign's process, or a service on the environment pool's host."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import dask
from distributed import LocalCluster

from infra.rpc import LOOPBACK
from tasks.environment.config import EnvironmentConfig


class UnprotectedCluster(RuntimeError):
    """Dask's own protocol has no token, so a cluster that is started for a run stays on loopback."""


async def start_local_cluster(config: EnvironmentConfig, group_members: int) -> LocalCluster:
    """A scheduler and `config.workers` worker processes on loopback."""
    # Dask silences its own handler only, and its records reach Prefect's as well.
    logging.getLogger("distributed").setLevel(logging.ERROR)
    slots = -(-config.concurrent_trajectories // group_members)
    settings = {
        "distributed.worker.memory.terminate": False,
        "distributed.admin.event-loop": "uvloop",
    }
    with dask.config.set(settings):
        return await LocalCluster(
            n_workers=config.workers,
            threads_per_worker=slots,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            asynchronous=True,
            memory_limit=0,
            silence_logs=logging.ERROR,
            env={
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "DASK_LOGGING__DISTRIBUTED": "error",
            },
        )


async def serve_cluster(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """The service. Settings: config (`EnvironmentConfig`), group_members, host. Says its scheduler's address.

    Raises `UnprotectedCluster` when it would have to be reached from another machine.
    """
    if settings.get("host", "127.0.0.1") not in LOOPBACK:
        raise UnprotectedCluster(
            "environments on another machine need a Dask cluster of yours, with TLS: "
            "name its scheduler in environment.scheduler"
        )
    config = EnvironmentConfig.model_validate(settings["config"])
    async with await start_local_cluster(config, settings["group_members"]) as cluster:
        ready({"url": cluster.scheduler_address})
        await asyncio.Event().wait()


if __name__ == "__main__":
    from infra.processes import serve

    logging.basicConfig(level=logging.INFO)
    serve(serve_cluster)
