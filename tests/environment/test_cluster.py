"""The Dask cluster of a run: its end, and what is known of it, when its worker is frozen or gone."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from infra.launcher import LocalLauncher
from tasks.environment.cluster import EnvironmentCluster
from tasks.environment.config import EnvironmentConfig

pytestmark = pytest.mark.slow


def worker_of_this_process() -> psutil.Process:
    """The one Dask worker process that is a child of this one."""
    (found,) = [
        child for child in psutil.Process().children() if "multiprocessing.spawn" in " ".join(child.cmdline())
    ]
    return found


async def test_a_frozen_worker_does_not_keep_the_cluster_from_ending(tmp_path: Path) -> None:
    cluster = await EnvironmentCluster.start(EnvironmentConfig(), 4, LocalLauncher(), tmp_path)
    await cluster.alive()
    worker = worker_of_this_process()
    os.kill(worker.pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        await cluster.stop()
    gone, alive = psutil.wait_procs([worker], timeout=5)
    assert (gone, alive) == ([worker], [])


async def test_a_cluster_whose_worker_was_killed_lives_while_its_nanny_starts_another(tmp_path: Path) -> None:
    cluster = await EnvironmentCluster.start(EnvironmentConfig(), 4, LocalLauncher(), tmp_path)
    first = worker_of_this_process()
    first.kill()
    await cluster.alive()
    async with asyncio.timeout(120):
        while not await asyncio.to_thread(second_than, first):
            await cluster.alive()
    await cluster.stop()


def second_than(first: psutil.Process) -> bool:
    """Whether another Dask worker has taken the place of the first, looked for during half a second."""
    psutil.wait_procs([first], timeout=0.5)
    try:
        return worker_of_this_process() != first
    except (ValueError, psutil.NoSuchProcess):
        return False
