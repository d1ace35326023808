"""The life of an inference worker, and whether a lost one is started again. Pure: events and times in.

starting --joined--> serving --late--> suspected --answered--> serving
any of these, and restarting --lost--> lost, or set aside once it was lost too often
lost --taken--> restarting --joined--> serving
"""

from collections import deque
from enum import StrEnum


class WorkerPhase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    SUSPECTED = "suspected"
    """It serves, but has not answered a heart-beat for half of the limit."""
    LOST = "lost"
    """It is to be started again."""
    RESTARTING = "restarting"
    SET_ASIDE = "set_aside"
    """For the rest of the run."""

    @property
    def serves(self) -> bool:
        """Whether the proxy sends it turns."""
        return self in (WorkerPhase.SERVING, WorkerPhase.SUSPECTED)


class RestartBudget:
    """At most `restarts` within any `window_s` seconds."""

    def __init__(self, restarts: int, window_s: float):
        self._restarts = restarts
        self._window_s = window_s
        self._spent: deque[float] = deque()

    def spend(self, at: float) -> bool:
        """Whether what was lost at this time (seconds, never decreasing) may be started again."""
        while self._spent and self._spent[0] <= at - self._window_s:
            self._spent.popleft()
        if len(self._spent) >= self._restarts:
            return False
        self._spent.append(at)
        return True


class WorkerLife:
    """Events that do not fit the phase change nothing: word of a past life comes late."""

    def __init__(self, budget: RestartBudget, phase: WorkerPhase = WorkerPhase.STARTING):
        self.phase = phase
        self._budget = budget

    def joined(self) -> bool:
        """It is connected, holds the served version, and gets turns. Returns False where it may not."""
        if self.phase in (WorkerPhase.STARTING, WorkerPhase.LOST, WorkerPhase.RESTARTING):
            self.phase = WorkerPhase.SERVING
            return True
        return False

    def late(self) -> None:
        if self.phase is WorkerPhase.SERVING:
            self.phase = WorkerPhase.SUSPECTED

    def answered(self) -> None:
        if self.phase is WorkerPhase.SUSPECTED:
            self.phase = WorkerPhase.SERVING

    def lost(self, at: float) -> bool:
        """It is gone, frozen, keeps failing, or could not be started, at this time in seconds.

        Returns False when that was known.
        """
        if self.phase in (WorkerPhase.LOST, WorkerPhase.SET_ASIDE):
            return False
        self.phase = WorkerPhase.LOST if self._budget.spend(at) else WorkerPhase.SET_ASIDE
        return True

    def taken(self) -> bool:
        """Whoever starts it again takes it up. Returns False where there is nothing to start."""
        if self.phase is not WorkerPhase.LOST:
            return False
        self.phase = WorkerPhase.RESTARTING
        return True
