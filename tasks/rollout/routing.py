"""Which inference worker serves a turn. Pure: the proxy tells it what happens and asks it where to send.

A trajectory stays with the worker that holds its KV cache (sticky); a new one goes to the worker with the
fewest open trajectories among those that its domain prefers. A dispatch costs one dictionary look-up for a
trajectory that is placed, and one pass over the domain's workers for a new one.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from infra.affinity import DEFAULT

logger = logging.getLogger(__name__)

WorkerRole = Literal["both", "prefill", "decode"]
"""What a worker does of a turn. With prefill workers there are, the others are given their KV."""


class NoWorker(LookupError):
    """No inference worker can take the trajectory."""


@dataclass(frozen=True, slots=True)
class FallBack:
    """A domain's turns go to another pool than the one it prefers: no worker of that is available."""

    domain: str
    preferred: str
    taken: str


def log_fall_back(fall_back: FallBack) -> None:
    logger.warning(
        "domain %r prefers pool %r, which has no inference worker available: its trajectories go to pool %r",
        fall_back.domain,
        fall_back.preferred,
        fall_back.taken,
    )


@dataclass(slots=True)
class WorkerState:
    name: str
    pool: str
    role: WorkerRole = "both"
    trajectories: set[str] = field(default_factory=set)
    prefills: int = 0  # of a prefill worker: given to it, and not said to be over
    failures: int = 0  # in a row
    available: bool = True
    turns: dict[str, int] = field(default_factory=dict)  # dispatched here, by domain


class Router:
    """Routes by `affinity`: the pool of each domain, under "default" that of all others.

    A domain without a pool goes anywhere. Where no worker of the pool is available, the pools of
    `fall_backs[pool]` are tried in their order (the compatible ones, nearest first), then any other;
    `on_fall_back` hears of it once for a domain and its pool.
    """

    def __init__(
        self,
        affinity: Mapping[str, str] | None = None,
        failures_allowed: int = 3,
        fall_backs: Mapping[str, Sequence[str]] | None = None,
        on_fall_back: Callable[[FallBack], None] = log_fall_back,
    ):
        self._affinity = dict(affinity or {})
        self._failures_allowed = failures_allowed
        self._fall_backs = {pool: tuple(others) for pool, others in (fall_backs or {}).items()}
        self._on_fall_back = on_fall_back
        self._workers: dict[str, WorkerState] = {}
        self._placed: dict[str, WorkerState] = {}
        self._candidates: dict[
            str, list[WorkerState]
        ] = {}  # by domain, until a worker or the affinity changes
        self._prefillers: list[WorkerState] | None = None  # available ones, until a worker changes
        self._fell_back: set[tuple[str, str]] = set()

    @property
    def workers(self) -> list[WorkerState]:
        return list(self._workers.values())

    @property
    def affinity(self) -> dict[str, str]:
        return dict(self._affinity)

    @property
    def open_trajectories(self) -> int:
        """Trajectories that are placed on a worker."""
        return len(self._placed)

    def served(self) -> dict[str, dict[str, int]]:
        """Turns dispatched so far: of each domain, to each pool. A turn that was moved counts twice."""
        served: dict[str, dict[str, int]] = {}
        for worker in self._workers.values():
            for domain, turns in worker.turns.items():
                pools = served.setdefault(domain, {})
                pools[worker.pool] = pools.get(worker.pool, 0) + turns
        return served

    def add_worker(self, name: str, pool: str = "default", role: WorkerRole = "both") -> None:
        """Raises ValueError for a name that is taken."""
        if name in self._workers:
            raise ValueError(f"there is an inference worker {name!r} already")
        self._workers[name] = WorkerState(name, pool, role)
        self._forget_candidates()

    def remove_worker(self, name: str) -> None:
        worker = self._workers.pop(name)
        for trajectory in worker.trajectories:
            del self._placed[trajectory]
        self._forget_candidates()

    def route(self, trajectory: str, domain: str) -> str:
        """The worker for this trajectory's next turn. Raises `NoWorker`."""
        worker = self._placed.get(trajectory)
        if worker is None or not worker.available:
            chosen = self._least_loaded(domain)
            if worker is not None:
                worker.trajectories.discard(trajectory)
            worker = chosen
            worker.trajectories.add(trajectory)
            self._placed[trajectory] = worker
        worker.turns[domain] = worker.turns.get(domain, 0) + 1
        return worker.name

    def route_prefill(self, domain: str, near: str | None = None) -> str | None:
        """The prefill worker for a turn of this domain, None where none is available.

        The one with the fewest prefills under way, among those of the domain's own pool if it has some:
        then the KV stays within the pool. `near`, which holds KV of the trajectory's earlier turns, is taken
        while it is available. `prefilled` says that the prefill is over.
        """
        if self._prefillers is None:
            self._prefillers = [w for w in self._workers.values() if w.available and w.role == "prefill"]
        workers = self._prefillers
        if not workers:
            return None
        pool = self._preferred(domain)
        worker = min(
            [w for w in workers if w.pool == pool] or workers,
            key=lambda worker: (worker.name != near, worker.prefills, worker.name),
        )
        worker.prefills += 1
        return worker.name

    def prefilled(self, name: str) -> None:
        """A prefill that `route_prefill` gave to this worker is over, one way or the other."""
        worker = self._workers.get(name)
        if worker is not None and worker.prefills:
            worker.prefills -= 1

    def release(self, trajectory: str) -> str | None:
        """The trajectory is over. Returns the worker that still holds its KV cache, if one does."""
        worker = self._placed.pop(trajectory, None)
        if worker is None:
            return None
        worker.trajectories.discard(trajectory)
        return worker.name

    def succeeded(self, name: str) -> None:
        self._workers[name].failures = 0

    def set_aside(self, name: str) -> None:
        """Send nothing more to this worker; its trajectories go on elsewhere."""
        self._workers[name].available = False
        self._forget_candidates()

    def restore(self, name: str) -> None:
        """A worker that was set aside is back, with nothing in its cache.

        What still waits for its next turn there goes on there; what has moved stays where it is.
        """
        worker = self._workers[name]
        worker.available, worker.failures, worker.prefills = True, 0, 0
        self._forget_candidates()

    def failed(self, name: str) -> bool:
        """A request on this worker failed. Returns True when it has now failed too often and is set aside."""
        worker = self._workers[name]
        worker.failures += 1
        if worker.available and worker.failures >= self._failures_allowed:
            self.set_aside(name)
            return True
        return False

    def rebind(self, affinity: Mapping[str, str]) -> None:
        """Domains prefer these pools from now on. Trajectories that are placed stay where they are."""
        self._affinity = dict(affinity)
        self._forget_candidates()
        self._fell_back.clear()

    def _forget_candidates(self) -> None:
        self._candidates.clear()
        self._prefillers = None

    def _preferred(self, domain: str) -> str | None:
        return self._affinity.get(domain, self._affinity.get(DEFAULT))

    def _least_loaded(self, domain: str) -> WorkerState:
        """Of equally loaded workers, the first by name."""
        candidates = self._candidates.get(domain)
        if candidates is None:
            candidates = self._candidates[domain] = self._candidates_for(domain)
        best = candidates[0]
        load = len(best.trajectories)
        for worker in candidates:
            if len(worker.trajectories) < load:
                best, load = worker, len(worker.trajectories)
        return best

    def _candidates_for(self, domain: str) -> list[WorkerState]:
        available = sorted(
            (w for w in self._workers.values() if w.available and w.role != "prefill"), key=lambda w: w.name
        )
        if not available:
            raise NoWorker(f"no inference worker is left for domain {domain!r}")
        preferred = self._preferred(domain)
        if preferred is None:
            return available
        for pool in (preferred, *self._fall_backs.get(preferred, ())):
            if workers := [worker for worker in available if worker.pool == pool]:
                if pool != preferred:
                    self._tell(FallBack(domain, preferred, pool))
                return workers
        self._tell(FallBack(domain, preferred, ", ".join(sorted({worker.pool for worker in available}))))
        return available

    def _tell(self, fall_back: FallBack) -> None:
        if (fall_back.domain, fall_back.preferred) not in self._fell_back:
            self._fell_back.add((fall_back.domain, fall_back.preferred))
            self._on_fall_back(fall_back)
