"""Which inference worker serves a turn. Pure: the proxy tells it what happens and asks it where to send.

A trajectory stays with the worker that holds its KV cache (sticky); a new one goes to the worker with the
fewest open trajectories among those that serve its domain.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

WorkerRole = Literal["both", "prefill", "decode"]
"""What a worker does of a turn. With prefill workers there are, the others are given their KV."""


class NoWorker(LookupError):
    """No inference worker can take the trajectory."""


@dataclass(slots=True)
class WorkerState:
    name: str
    pool: str
    role: WorkerRole = "both"
    trajectories: set[str] = field(default_factory=set)
    failures: int = 0  # in a row
    available: bool = True


class Router:
    """`pools` maps a domain to the pool that serves it; a domain without an entry goes anywhere."""

    def __init__(self, pools: Mapping[str, str] | None = None, failures_allowed: int = 3):
        self._pools = dict(pools or {})
        self._failures_allowed = failures_allowed
        self._workers: dict[str, WorkerState] = {}
        self._placed: dict[str, str] = {}

    @property
    def workers(self) -> list[WorkerState]:
        return list(self._workers.values())

    def add_worker(self, name: str, pool: str = "default", role: WorkerRole = "both") -> None:
        self._workers[name] = WorkerState(name, pool, role)

    def remove_worker(self, name: str) -> None:
        worker = self._workers.pop(name)
        for trajectory in worker.trajectories:
            del self._placed[trajectory]

    def route(self, trajectory: str, domain: str) -> str:
        """The worker for this trajectory's next turn. Raises `NoWorker`."""
        placed = self._placed.get(trajectory)
        if placed is not None and self._workers[placed].available:
            return placed
        self.release(trajectory)
        worker = min(self._candidates(domain), key=lambda worker: (len(worker.trajectories), worker.name))
        worker.trajectories.add(trajectory)
        self._placed[trajectory] = worker.name
        return worker.name

    def release(self, trajectory: str) -> str | None:
        """The trajectory is over. Returns the worker that still holds its KV cache, if one does."""
        name = self._placed.pop(trajectory, None)
        if name is not None:
            self._workers[name].trajectories.discard(trajectory)
        return name

    def succeeded(self, name: str) -> None:
        self._workers[name].failures = 0

    def set_aside(self, name: str) -> None:
        """Send nothing more to this worker; its trajectories go on elsewhere."""
        self._workers[name].available = False

    def failed(self, name: str) -> bool:
        """A request on this worker failed. Returns True when it has now failed too often and is set aside."""
        worker = self._workers[name]
        worker.failures += 1
        if worker.available and worker.failures >= self._failures_allowed:
            worker.available = False
            return True
        return False

    def _candidates(self, domain: str) -> list[WorkerState]:
        available = [w for w in self._workers.values() if w.available and w.role != "prefill"]
        preferred = [worker for worker in available if worker.pool == self._pools.get(domain, worker.pool)]
        if not available:
            raise NoWorker(f"no inference worker is left for domain {domain!r}")
        return preferred or available
