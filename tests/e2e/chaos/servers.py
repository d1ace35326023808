"""Servers that a run leans on, started for one test, which knows their processes and can harm them."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil


def free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@contextmanager
def process(command: list[str], log: Path, **environment: str) -> Iterator[psutil.Process]:
    """A process of one's own, which ends with everything it started, frozen or not."""
    with log.open("ab") as output:
        started = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **environment}, start_new_session=True
        )
    try:
        yield psutil.Process(started.pid)
    finally:
        for child in psutil.Process(started.pid).children(recursive=True) if started.poll() is None else []:
            child.kill()
        started.kill()
        started.wait()


def wait_port(port: int, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline, f"nothing listens on {port}"
        time.sleep(0.1)


class DaskCluster:
    """A scheduler, and a worker that is started anew with each scheduler."""

    def __init__(self, folder: Path):
        self.port = free_port()
        self.address = f"tcp://127.0.0.1:{self.port}"
        self._folder = folder

    @contextmanager
    def running(self) -> Iterator[psutil.Process]:
        """Yields the scheduler's process."""
        dask = [sys.executable, "-m", "dask"]
        listen = ["--host", "127.0.0.1", "--port", str(self.port), "--no-dashboard"]
        sizes = ["--nworkers", "1", "--nthreads", "16", "--memory-limit", "0", "--no-dashboard"]
        place = ["--local-directory", str(self._folder)]
        log = self._folder / "dask.log"
        with process([*dask, "scheduler", *listen], log) as scheduler:
            wait_port(self.port)
            with process([*dask, "worker", self.address, *sizes, *place, "--host", "127.0.0.1"], log):
                yield scheduler


@contextmanager
def prefect_server(folder: Path, port: int) -> Iterator[psutil.Process]:
    """On a database in `folder`, so that a server that is started again knows the runs of the one before."""
    prefect = str(Path(sys.executable).with_name("prefect"))
    command = [prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    settings = {
        "PREFECT_HOME": str(folder),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    with process(command, folder / "server.log", **settings) as server:
        deadline = time.monotonic() + 90
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=2):
                    break
            except OSError:
                assert time.monotonic() < deadline, (folder / "server.log").read_text()
                time.sleep(0.3)
        yield server
