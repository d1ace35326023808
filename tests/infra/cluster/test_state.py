"""Which processes a cluster may end: its own, and no other."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from infra.cluster.state import MARK, ClusterState, RecordedProcess

SLEEP = "import time; time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}"
PARENT = (
    "import subprocess, sys;"
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True);"
    f"print(child.pid, flush=True); {SLEEP}"
)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(*code: str, mark: str | None = None) -> "subprocess.Popen[str]":
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        if mark is not None:
            environment[MARK] = mark
        process = subprocess.Popen(
            [sys.executable, "-c", *code], env=environment, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def gone(pid: int, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_a_recorded_process_is_ended_and_another_with_its_id_is_not(tmp_path: Path, start: Start) -> None:
    state = ClusterState(tmp_path)
    own, other = start(SLEEP), start(SLEEP)
    state.record("own", own.pid)
    state.processes.append(RecordedProcess("long gone", other.pid, started=1_000_000.0))
    assert [process.pid for process in state.running()] == [own.pid]
    assert state.stop(grace_s=20) == []
    assert gone(own.pid)
    assert other.poll() is None


def test_children_in_sessions_of_their_own_end_too(tmp_path: Path, start: Start) -> None:
    state = ClusterState(tmp_path)
    parent = start(PARENT, SLEEP)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    state.record("parent", parent.pid)
    assert state.stop(grace_s=20) == []
    assert gone(parent.pid)
    assert gone(child)


def test_what_carries_the_mark_is_found_when_its_parent_was_killed(tmp_path: Path, start: Start) -> None:
    state = ClusterState(tmp_path)
    parent = start(PARENT, SLEEP, mark=state.mark)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    stranger = start(SLEEP, mark="of another cluster")
    assert [process.pid for process in state.running()] == [child]
    assert state.stop(grace_s=20) == []
    assert gone(child)
    assert stranger.poll() is None


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path, start: Start) -> None:
    state = ClusterState(tmp_path)
    deaf = start(DEAF)
    assert deaf.stdout is not None
    assert deaf.stdout.readline() == "deaf\n"
    state.record("deaf", deaf.pid)
    assert state.stop(grace_s=0.5) == []
    assert gone(deaf.pid)


def test_the_state_is_read_as_it_was_saved_and_by_its_owner_alone(tmp_path: Path) -> None:
    assert ClusterState.read(tmp_path) is None
    state = ClusterState(tmp_path, urls={"dask": "tcp://127.0.0.1:1"})
    state.record("this", os.getpid())
    assert ClusterState.read(tmp_path) == state
    assert (tmp_path / "cluster.json").stat().st_mode & 0o077 == 0


def test_it_never_ends_the_process_that_asks(tmp_path: Path) -> None:
    state = ClusterState(tmp_path)
    state.record("this", os.getpid())
    assert os.getpid() not in {process.pid for process in state.running()}
