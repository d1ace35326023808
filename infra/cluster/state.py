"""What of a local cluster runs, in its folder: which processes are its own, beyond doubt, also after a crash.

A process belongs to the cluster when it was recorded with its id and start time, descends from such a one, or
carries the cluster's mark in its environment (a flow run's process whose worker was killed, for example).
Nothing else is ever signalled.
"""

import contextlib
import os
import secrets
import signal
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

MARK = "TUTTI_CLUSTER"


@dataclass(frozen=True, slots=True)
class RecordedProcess:
    name: str
    pid: int
    started: float
    """As psutil says it: seconds since 1970."""

    def find(self) -> psutil.Process | None:
        """The process, if it still runs; another one that has its id by now is none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started) < 0.5 and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


@dataclass(slots=True)
class ClusterState:
    """Saved whenever it changes, readable by its owner alone."""

    folder: Path
    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    processes: list[RecordedProcess] = field(default_factory=list)
    urls: dict[str, str] = field(default_factory=dict)
    """Where people and campaigns find the parts."""
    files: list[str] = field(default_factory=list)
    """What parts leave outside of the folder."""

    @classmethod
    def read(cls, folder: Path) -> "ClusterState | None":
        """The state of the cluster in this folder, or None when it has none."""
        try:
            data = (folder / "cluster.json").read_bytes()
        except FileNotFoundError:
            return None
        return TypeAdapter(cls).validate_json(data)

    def save(self) -> None:
        data: dict[str, Any] = asdict(self)
        path = self.folder / "cluster.json"
        unfinished = path.with_suffix(".new")
        unfinished.touch(mode=0o600)
        unfinished.write_bytes(TypeAdapter(dict[str, Any]).dump_json(data, indent=2))
        unfinished.replace(path)

    def record(self, name: str, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.processes.append(RecordedProcess(name, pid, psutil.Process(pid).create_time()))
        self.save()

    def running(self) -> list[psutil.Process]:
        """Every process of the cluster that runs, none twice, this one never."""
        found: dict[int, psutil.Process] = {}
        for recorded in self.processes:
            process = recorded.find()
            if process is None:
                continue
            found[process.pid] = process
            with contextlib.suppress(psutil.NoSuchProcess):
                found.update({child.pid: child for child in process.children(recursive=True)})
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid not in found and process.environ().get(MARK) == self.mark:
                    found[process.pid] = process
        found.pop(os.getpid(), None)
        return [process for process in found.values() if _alive(process)]

    def stop(self, grace_s: float = 10.0) -> list[int]:
        """End every process: politely, then by SIGKILL. Returns the ids of those that would not end."""
        polite: dict[str, int] = {"postgres": signal.SIGINT}  # its fast shutdown; SIGTERM waits for clients
        database = {item.pid for item in self.processes if item.name in polite}
        for pids_of_database in (False, True):
            chosen = [item for item in self.running() if (item.pid in database) == pids_of_database]
            if not pids_of_database:
                chosen = [item for item in chosen if not _descends(item, database)]
            for process in chosen:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGINT if pids_of_database else signal.SIGTERM)
            psutil.wait_procs(chosen, timeout=grace_s)
        for _ in range(3):  # what was being started meanwhile is found in the next round
            remaining = self.running()
            for process in remaining:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(remaining, timeout=grace_s)
        return [process.pid for process in self.running()]


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _descends(process: psutil.Process, ancestors: set[int]) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(parent.pid in ancestors for parent in process.parents())
    return False
