"""Starts the ranks of a trainer on this machine, and ends with them.

The ranks are started and watched by torchrun's launcher. When one dies the others are ended and the service
fails with one error. The settings reach rank 0 through a named pipe that only this user can open, so that no
token lies in a file or shows in a process list.
"""

import asyncio
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tasks.campaign import Campaign
from tasks.train.ranks import send_settings

SHUTDOWN_S = 5
"""What the other ranks get to end by themselves once one has died."""


class RanksFailed(RuntimeError):
    """A rank of the trainer died. The message names it and how it ended."""


async def run_ranks(settings: dict[str, Any]) -> None:
    """Run the trainer's ranks until one ends; rank 0 announces the service by itself, on standard output.

    Raises `RanksFailed`. No rank is left when it ends, cancelled or not; after a SIGKILL of this process the
    ranks see that it is gone and end by themselves.
    """
    processes = Campaign.parse(settings["campaign"]).train.trainer.processes
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()
    with tempfile.TemporaryDirectory(prefix="tutti-ranks-") as folder:
        pipe = Path(folder) / "settings"
        os.mkfifo(pipe, 0o600)
        # Daemon threads: neither may keep this process alive when it has been told to end.
        threading.Thread(target=send_settings, args=(settings, pipe), daemon=True).start()
        threading.Thread(
            target=_launch, args=(processes, pipe, folder, loop, ended), daemon=True, name="launcher"
        ).start()
        try:
            raise RanksFailed(await ended)
        finally:
            await asyncio.to_thread(_end_children)


def _launch(
    processes: int,
    pipe: Path,
    logs: str,
    loop: asyncio.AbstractEventLoop,
    ended: "asyncio.Future[str]",
) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=logs),
        shutdown_timeout=SHUTDOWN_S,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "tasks.train.ranks", str(pipe))
        message = "every rank of the trainer ended by itself"
    except ChildFailedError as error:
        message = describe({index: failure.exitcode for index, failure in error.failures.items()})
    except Exception as error:
        message = f"the ranks of the trainer did not start: {type(error).__name__}: {error}"
    loop.call_soon_threadsafe(ended.set_result, message)


def describe(exit_codes: dict[int, int]) -> str:
    """How the ranks of a trainer ended, given their exit codes: those that were killed first."""
    lines = []
    for index, code in sorted(exit_codes.items(), key=lambda entry: (entry[1] >= 0, entry[0])):
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        lines.append(f"rank {index} {how}")
    return f"the trainer ended, since {'; '.join(lines)}: its log, above, says why"


def _end_children() -> None:
    children = psutil.Process().children(recursive=True)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(children, timeout=SHUTDOWN_S)
