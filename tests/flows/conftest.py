import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from socket import socket

import pytest

from infra.cluster.state import MARK, ClusterState
from tests.bench import small_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    small_llama.build(directory)
    return directory


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Prefect server of this test session; yields the environment that points a process at it."""
    home = tmp_path_factory.mktemp("prefect")
    with closing(socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    prefect = str(Path(sys.executable).with_name("prefect"))
    with (home / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env={name: value for name, value in environment.items() if name != "PREFECT_API_URL"},
            stdout=log,
            stderr=log,
        )
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=2):
                break
        except (urllib.error.URLError, OSError):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((home / "server.log").read_text()) from None
            time.sleep(0.3)
    yield environment
    server.terminate()
    server.wait(timeout=30)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A whole local cluster, as of `make up`; yields the environment that points a process at it."""
    folder = tmp_path_factory.mktemp("cluster")
    command = [sys.executable, "-m", "infra.cluster", "--folder", str(folder)]
    up = subprocess.run(
        [*command, "up", "--free-ports"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert up.returncode == 0, up.stdout + up.stderr
    state = ClusterState.read(folder)
    assert state is not None
    try:
        yield {
            "PREFECT_API_URL": state.urls["PREFECT_API_URL"],
            "PREFECT_HOME": str(tmp_path_factory.mktemp("home")),
            "TUTTI_DASK_SCHEDULER": state.urls["dask"],
            MARK: state.mark,
        }
    finally:
        down = subprocess.run([*command, "down"], capture_output=True, text=True, timeout=120, check=False)
    assert down.returncode == 0, down.stdout + down.stderr
    assert state.running() == []
    assert [path.name for path in folder.iterdir()] == ["logs"]
