"""A Dask cluster of one machine: in the campaign's process, or a service on the environment pool's host."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import dask
import psutil
from distributed import LocalCluster

from infra.processes import wake_with_parent
from infra.rpc import LOOPBACK
from tasks.environment.config import EnvironmentConfig


class UnprotectedCluster(RuntimeError):
    """Dask's own protocol has no token, so a cluster that is started for a run stays on loopback."""


async def start_local_cluster(
    config: EnvironmentConfig, group_members: int, silence_limit_s: float = 60.0
) -> LocalCluster:
    """A scheduler and `config.workers` worker processes on loopback.

    A worker without a heart-beat for `silence_limit_s` (Dask takes 5 s at least) is killed and replaced.
    """
    # Dask silences its own handler only, and its records reach Prefect's as well.
    logging.getLogger("distributed").setLevel(logging.ERROR)
    slots = -(-config.concurrent_trajectories // group_members)
    # Read when a worker goes, so it has to stay set: after 15 s Dask would give up the nanny that is starting
    # another one, and on a busy machine the start takes longer.
    dask.config.set({"distributed.deploy.lost-worker-timeout": "1h"})
    settings = {
        "distributed.worker.memory.terminate": False,
        "distributed.admin.event-loop": "uvloop",
        "distributed.scheduler.worker-ttl": f"{silence_limit_s:g}s",
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
            preload=["tasks.environment.local_cluster"],
            silence_logs=logging.ERROR,
            env={
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "DASK_LOGGING__DISTRIBUTED": "error",
            },
        )


def dask_setup(_: Any) -> None:
    """What Dask calls in each worker process that preloads this module."""
    # It has a word a step for the question how rewards do; Prefect's handler would print it.
    logging.getLogger("distributed.worker").setLevel(logging.ERROR)
    wake_with_parent()


def worker_processes(cluster: LocalCluster) -> list[psutil.Process]:
    """The worker processes and what they started, as they run now."""
    found: dict[int, psutil.Process] = {}
    for nanny in cluster.workers.values():
        pid = nanny.pid
        if pid is not None and psutil.pid_exists(pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                worker = psutil.Process(pid)
                found |= {process.pid: process for process in (worker, *worker.children(recursive=True))}
    return list(found.values())


def end_tree(process: psutil.Process) -> None:
    """SIGKILL, unless it has ended or is another process by now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


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
    async with await start_local_cluster(
        config, settings["group_members"], settings.get("silence_limit_s", 60.0)
    ) as cluster:
        ready({"url": cluster.scheduler_address})
        await asyncio.Event().wait()


if __name__ == "__main__":
    from infra.processes import serve

    logging.basicConfig(level=logging.INFO)
    serve(serve_cluster)
