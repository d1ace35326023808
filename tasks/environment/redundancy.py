"""One group: how many members to launch, which ends count, who is tried again, who is cancelled."""

from dataclasses import dataclass, field

from tasks.trajectory import InfraError, Reward, TrajectoryHeader


def counts(header: TrajectoryHeader) -> bool:
    """Whether a trajectory may be trained: it has a reward, and neither a fault nor an abort ended it."""
    return isinstance(header.outcome, Reward) and not header.stop.is_aborted and not header.stop.is_failure


@dataclass(slots=True)
class GroupProgress:
    """The members of a group from launch to completion. `size` of `size + redundant` are wanted."""

    group: int
    domain: str
    size: int
    redundant: int
    attempts: int
    running: dict[int, int] = field(default_factory=dict)  # member -> attempt
    done: dict[int, TrajectoryHeader] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)  # members that will not be tried again

    def launch(self) -> list[tuple[int, int]]:
        """The (member, attempt) pairs to start: all members that have neither ended nor been given up."""
        started = []
        for member in range(self.size + self.redundant):
            if member not in self.done and member not in self.lost and member not in self.running:
                self.running[member] = 0
                started.append((member, 0))
        return started

    def ended(self, header: TrajectoryHeader) -> int | None:
        """Take in the end of a member. Returns the attempt to start in its place, if any.

        Only a trajectory with a `Reward` outcome counts. A fault is tried again while attempts last; a
        trajectory that was skipped or aborted is not. News of an attempt that is not running is ignored.
        """
        member = header.key.member
        if self.running.get(member) != header.key.attempt:
            return None
        del self.running[member]
        if counts(header):
            self.done[member] = header
            return None
        retry = header.key.attempt + 1
        faulty = header.stop.is_failure or isinstance(header.outcome, InfraError)
        wanted = len(self.done) < self.size
        if faulty and wanted and not header.stop.is_aborted and retry < self.attempts:
            self.running[member] = retry
            return retry
        self.lost.add(member)
        return None

    @property
    def is_complete(self) -> bool:
        """All wanted members are there, or none that could still come is running."""
        return len(self.done) >= self.size or not self.running

    @property
    def members(self) -> tuple[TrajectoryHeader, ...]:
        """The members that count, at most `size`, in order."""
        return tuple(self.done[member] for member in sorted(self.done)[: self.size])
