"""Which turns the proxy still lets through. Pure: the control plane's word in, a refusal or nothing out."""

from collections.abc import Iterable

from tasks.trajectory import StopReason


class TurnRefused(Exception):
    """This trajectory gets no further turn; `reason` says why."""

    def __init__(self, reason: StopReason, message: str):
        super().__init__(message)
        self.reason = reason


class TurnGate:
    """Knows aborted trajectories, and the oldest version that a trajectory may have begun at.

    An aborted one is remembered until it is finished; of those that never are, because their environment was
    lost, the newest `max_aborted`.
    """

    def __init__(self, max_aborted: int = 100_000) -> None:
        self._aborted: dict[str, StopReason] = {}  # in the order of their aborts
        self._max_aborted = max_aborted
        self._oldest_admissible = 0

    @property
    def aborted(self) -> int:
        return len(self._aborted)

    def check(self, trajectory: str, initiating_version: int | None) -> None:
        """Before every turn. `None` is a trajectory that no bound applies to. Raises `TurnRefused`."""
        reason = self._aborted.get(trajectory)
        if reason is not None:
            raise TurnRefused(reason, f"{trajectory} was aborted")
        if initiating_version is not None and initiating_version < self._oldest_admissible:
            raise TurnRefused(StopReason.STALE, f"{trajectory} began at version {initiating_version}")

    def abort(self, trajectories: Iterable[str], reason: StopReason) -> None:
        self._aborted.update(dict.fromkeys(trajectories, reason))
        while len(self._aborted) > self._max_aborted:
            del self._aborted[next(iter(self._aborted))]

    def finish(self, trajectories: Iterable[str]) -> None:
        for trajectory in trajectories:
            self._aborted.pop(trajectory, None)

    def set_oldest_admissible(self, version: int) -> None:
        """Refuse turns of trajectories begun before this version."""
        self._oldest_admissible = version
