"""A whole cluster, up and down: what `make up` and `make down` run."""

import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.cluster.config import Ports
from infra.cluster.parts import PartMissing
from infra.cluster.ports import PortTaken, with_free_ports
from infra.cluster.postgres import postgres_program
from infra.cluster.state import ClusterState

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that PostgreSQL's own user can enter, which pytest's are not; nothing of it is left running."""
    folder = Path(tempfile.mkdtemp(prefix="tutti-cluster-"))
    folder.chmod(0o755)
    yield folder
    command(folder, "down")
    shutil.rmtree(folder)


def command(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "infra.cluster", "--folder", str(folder), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_port_in_use_is_one_error_that_names_the_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortTaken, match=r"--ports\.dask"):
            with_free_ports(Ports(prefect=0, s3=0, mooncake=0, dask=taken.getsockname()[1], postgres=0))


def test_free_ports_are_all_different() -> None:
    ports = with_free_ports(Ports(**dict.fromkeys(Ports.model_fields, 0)))
    chosen = list(ports.model_dump().values())
    assert len(set(chosen)) == len(chosen)
    assert all(port > 0 for port in chosen)


def test_down_without_a_cluster_does_nothing(tmp_path: Path) -> None:
    assert command(tmp_path / "none", "down").returncode == 0
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_up_on_postgresql_serves_and_down_leaves_the_logs_alone(folder: Path) -> None:
    try:
        postgres_program("initdb")
    except PartMissing as missing:
        pytest.skip(str(missing))
    up = command(folder, "up", "--postgres", "--free-ports", "--no-deploy")
    assert up.returncode == 0, up.stdout + up.stderr
    state = ClusterState.read(folder)
    assert state is not None
    api = state.urls["PREFECT_API_URL"]
    with urllib.request.urlopen(f"{api}/health", timeout=30) as answer:
        assert answer.read() == b"true"
    assert "postgres" in {process.name for process in state.processes}
    # No SQLite file anywhere: what Prefect knows is in PostgreSQL.
    assert list(folder.rglob("*.db")) == []
    assert len(list((folder / "postgres" / "base").iterdir())) >= 3
    again = command(folder, "up", "--free-ports", "--no-deploy")
    assert again.returncode == 1
    assert "make down" in again.stderr

    ports = {int(port) for url in state.urls.values() for port in re.findall(r"127\.0\.0\.1:(\d+)", url)}
    assert len(ports) >= 3
    assert any(Path(file).exists() for file in state.files)
    assert all(listens(port) for port in ports)
    down = command(folder, "down")
    assert down.returncode == 0, down.stderr
    assert state.running() == []
    assert not any(listens(port) for port in ports)
    assert not any(Path(file).exists() for file in state.files)
    assert [path.name for path in folder.iterdir()] == ["logs"]


@pytest.mark.slow
def test_down_cleans_up_after_an_up_that_was_killed(folder: Path) -> None:
    up = subprocess.Popen(
        [sys.executable, "-m", "infra.cluster", "--folder", str(folder), "up", "--free-ports"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while True:
        state = ClusterState.read(folder)
        if state is not None and len(state.processes) >= 3:
            break
        assert up.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    up.kill()
    up.wait()
    assert len(state.running()) >= 3
    assert command(folder, "down").returncode == 0
    assert state.running() == []
    assert [path.name for path in folder.iterdir()] == ["logs"]
