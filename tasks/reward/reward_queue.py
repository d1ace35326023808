"""Which rewards go to which activation, and what becomes of those whose activation is lost.

Pure: the caller says what happened and when, and performs what `plan` decides. Each reward ends exactly once,
with the first outcome that arrives for its key; what comes later is a duplicate and dropped.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tasks.reward.config import ServerlessConfig
from tasks.reward.mailbox import Report, Work

_LONGEST_PAUSE_S = 30.0
_FRESH = 0.7  # of its idle time, after which an activation may end before it sees what it is sent


@dataclass(slots=True)
class _Request:
    work: Work
    retries: int
    asked: float
    not_before: float
    tries: int = 0


@dataclass(slots=True)
class _Activation:
    name: str
    started: float
    heard: float
    ready: bool = False
    idle_since: float | None = None
    moved: float = 0.0  # when it last was given work while it had none, or answered
    assigned: dict[str, _Request] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Start:
    """Start an activation, with work from the beginning unless it is to wait for some."""

    activation: str
    work: list[Work]


@dataclass(frozen=True, slots=True)
class Send:
    """Send work to an activation that stayed."""

    activation: str
    work: list[Work]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The reward ends without an outcome."""

    key: str
    reason: str


Action = Start | Send | GiveUp


@dataclass(slots=True)
class ServerlessCounts:
    """What the dispatch of one environment worker has done so far; seconds are sums."""

    asked: int = 0
    repeated: int = 0  # asked again, answered from what is known or on its way
    batches: int = 0
    activations: int = 0
    cold_starts: int = 0  # activations that reported ready
    cold_start_seconds: float = 0.0  # from the decision to start until ready
    lost: int = 0  # activations that failed, never reported, or fell silent
    retries: int = 0  # rewards sent again
    duplicates: int = 0  # outcomes that came after the first
    given_up: int = 0
    busy_seconds: float = 0.0  # of activations with rewards to judge
    activation_seconds: float = 0.0  # of activations that ended in good order
    gone_seconds: float = 0.0  # of all that are gone, from the decision to start them
    concurrency_peak: int = 0  # most activations at a time


class RewardQueue:
    """The state of one dispatcher. Times are seconds on one clock, not earlier than in the call before."""

    def __init__(self, config: ServerlessConfig, names: Iterable[str]):
        """`names` gives a new name for every activation."""
        self._config = config
        self._names = iter(names)
        self._waiting: deque[_Request] = deque()
        self._open: dict[str, _Request] = {}
        self._activations: dict[str, _Activation] = {}
        self._reasons: dict[str, str] = {}
        self.counts = ServerlessCounts()

    @property
    def open(self) -> int:
        """Rewards that have not ended."""
        return len(self._open)

    @property
    def activations(self) -> list[str]:
        return list(self._activations)

    def function_seconds(self, time: float) -> float:
        """Seconds of all activations so far, from the decision to start to the end, or until now.

        Cold starts included, so a service bills that much at most.
        """
        alive = sum(time - activation.started for activation in self._activations.values())
        return self.counts.gone_seconds + alive

    def starting(self) -> list[str]:
        """Activations that have not reported yet."""
        return [name for name, activation in self._activations.items() if not activation.ready]

    def ask(self, work: Work, retries: int, time: float) -> None:
        """A reward is wanted. The key must not be open."""
        request = _Request(work, retries, time, time)
        self._open[work.key] = request
        self._waiting.append(request)
        self.counts.asked += 1

    def warm_up(self, time: float) -> list[Start]:
        """The activations to start before there is any work."""
        if self._config.idle_limit_s == 0:
            return []
        wanted = min(self._config.warm_workers, self._config.activations)
        return [Start(self._new_activation(time).name, []) for _ in range(wanted - len(self._activations))]

    def heard(self, activation: str, report: Report, time: float) -> list[str]:
        """A report has come, from an activation of now or of earlier; returns keys that end by it."""
        present = self._activations.get(activation)
        if present is not None:
            present.heard = time
            if not present.ready:
                present.ready = True
                self.counts.cold_starts += 1
                self.counts.cold_start_seconds += time - present.started
                present.idle_since = time
        self.counts.busy_seconds += report.seconds if report.kind == "results" else 0.0
        ended = []
        for key, _ in report.results:
            request = self._open.pop(key, None)
            if request is None:
                self.counts.duplicates += 1
                continue
            ended.append(key)
            self._reasons.pop(key, None)
            for other in self._activations.values():
                if other.assigned.pop(key, None) is not None:
                    other.moved = time
                    other.idle_since = None if other.assigned else time
        if ended:
            gone = set(ended)
            self._waiting = deque(request for request in self._waiting if request.work.key not in gone)
        if report.kind == "ended":
            self.counts.activation_seconds += report.seconds
            self._drop(activation, "the activation ended without judging it", time)
        if report.kind == "failed":
            self.lost(activation, report.text, time)
        return ended

    def lost(self, activation: str, reason: str, time: float) -> None:
        """An activation is no more: its work waits again, or is given up at the next `plan`."""
        if activation in self._activations:
            self.counts.lost += 1
            self._drop(activation, reason, time)

    def plan(self, time: float) -> list[Action]:
        """What to do now."""
        actions: list[Action] = []
        for activation in list(self._activations.values()):
            if not activation.ready and time - activation.started > self._config.start_limit_s:
                limit = f"reward.serverless.start_limit_s is {self._config.start_limit_s:g}"
                self.lost(activation.name, f"the activation did not report in time ({limit})", time)
            elif activation.ready and time - activation.heard > self._config.silence_limit_s:
                limit = f"reward.serverless.silence_limit_s is {self._config.silence_limit_s:g}"
                self.lost(activation.name, f"the activation fell silent ({limit})", time)
            elif activation.assigned and time - activation.moved > self._patience_s(activation):
                self.lost(activation.name, "the activation is alive and answers nothing", time)
        for request in [request for request in self._waiting if request.tries > request.retries]:
            self._waiting.remove(request)
            del self._open[request.work.key]
            self.counts.given_up += 1
            reason = self._reasons.pop(request.work.key)
            actions.append(GiveUp(request.work.key, f"{reason}, after {request.tries} tries"))
        while batch := self._batch(time):
            action = self._place(batch, time)
            if action is None:
                self._waiting.extendleft(reversed(batch))
                break
            actions.append(action)
        return actions

    def _batch(self, time: float) -> list[_Request]:
        """The next batch to send, taken from those that wait; empty when none is due."""
        ready = [request for request in self._waiting if request.not_before <= time]
        due = len(ready) >= self._config.batch_size or any(
            time - request.asked >= self._config.linger_s for request in ready
        )
        if not due:
            return []
        batch = ready[: self._config.batch_size]
        chosen = {id(request) for request in batch}
        self._waiting = deque(request for request in self._waiting if id(request) not in chosen)
        return batch

    def _place(self, batch: list[_Request], time: float) -> Action | None:
        work = [request.work for request in batch]
        activation = self._one_that_stayed(0, time)
        fresh = activation is None and len(self._activations) < self._config.activations
        if fresh:
            activation = self._new_activation(time)
        elif activation is None:
            activation = self._one_that_stayed(self._config.batch_size, time)
        if activation is None:
            return None
        activation.idle_since = None
        if not activation.assigned:
            activation.moved = time
        activation.assigned |= {request.work.key: request for request in batch}
        self.counts.batches += 1
        return Start(activation.name, work) if fresh else Send(activation.name, work)

    def _one_that_stayed(self, most: int, time: float) -> _Activation | None:
        """The least loaded activation that will see what it is sent, with `most` rewards assigned at most."""
        idle_limit_s = self._config.idle_limit_s
        fitting = [
            activation
            for activation in self._activations.values()
            if idle_limit_s > 0
            and len(activation.assigned) <= most
            and time - activation.started < self._config.life_s
            and (activation.idle_since is None or time - activation.idle_since < _FRESH * idle_limit_s)
        ]
        return min(
            fitting, key=lambda activation: (len(activation.assigned), not activation.ready), default=None
        )

    def _patience_s(self, activation: _Activation) -> float:
        """Longest time between two answers: a reward that hangs, and the start of a process after it."""
        longest = max(request.work.limit_s for request in activation.assigned.values())
        return longest + self._config.start_limit_s + self._config.silence_limit_s

    def _new_activation(self, time: float) -> _Activation:
        activation = _Activation(next(self._names), time, time)
        self._activations[activation.name] = activation
        self.counts.activations += 1
        self.counts.concurrency_peak = max(self.counts.concurrency_peak, len(self._activations))
        return activation

    def _drop(self, name: str, reason: str, time: float) -> None:
        activation = self._activations.pop(name, None)
        if activation is None:
            return
        self.counts.gone_seconds += time - activation.started
        for request in reversed(activation.assigned.values()):
            pause = min(self._config.retry_pause_s * 2**request.tries, _LONGEST_PAUSE_S)
            request.tries += 1
            request.not_before = time + pause
            self._reasons[request.work.key] = reason
            self.counts.retries += request.tries <= request.retries
            self._waiting.appendleft(request)
