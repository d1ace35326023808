"""Processes that share the cores of one machine: as long as more compute than there are cores, all slow down.

Processor sharing: of n processes that compute at once on c cores, each gets min(1, c / n) of one, and cores
that are all at work are each slower than one alone. A process has one thread that computes, and its time is
that of this thread on a core of a machine that does nothing else.
"""

import asyncio
from collections.abc import Callable

from infra.clock import now


class SharedCores:
    """The cores of one machine."""

    def __init__(self, cores: float, pace_when_full: float = 1.0):
        self.cores = cores
        self.pace_when_full = pace_when_full
        self._busy: dict[ProcessClock, None] = {}

    def process(self) -> "ProcessClock":
        return ProcessClock(self)

    @property
    def pace(self) -> float:
        """Seconds of its own time a second, of each process that computes."""
        busy = len(self._busy)
        if busy < 2:
            return 1.0
        full = min((busy - 1) / (self.cores - 1), 1.0) if self.cores > 1 else 1.0
        return (1.0 - (1.0 - self.pace_when_full) * full) * min(1.0, self.cores / busy)

    def changed(self, process: "ProcessClock", busy: bool) -> None:
        """The process begins or ceases to compute. For `ProcessClock`."""
        before = self.pace
        if busy:
            self._busy[process] = None
        else:
            self._busy.pop(process, None)
        if self.pace != before:
            for other in self._busy:
                other.pace_changed()


class _Timer:
    def __init__(self, clock: "ProcessClock", when: float, callback: Callable[[], object]):
        self.callback = callback
        self._clock = clock
        self._when = when
        self._cancelled = False

    def when(self) -> float:
        return self._when

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._clock.dropped(self)


class ProcessClock:
    """`infra.clock.Clock` of one process: it computes while a timer is set or a sleep is under way.

    While it computes it goes at the cores' pace; while it is idle, as the event loop does.
    """

    def __init__(self, cores: SharedCores):
        self._cores = cores
        self._timers: dict[_Timer, asyncio.TimerHandle] = {}
        self._read_at = now()
        self._read = self._read_at
        self._pace = 1.0
        self._turn = asyncio.Lock()

    def now(self) -> float:
        return self._read + (now() - self._read_at) * self._pace

    def call_at(self, when: float, callback: Callable[[], object]) -> _Timer:
        timer = _Timer(self, when, callback)
        if not self._timers:
            self._cores.changed(self, busy=True)
            self._set_pace(self._cores.pace)
        self._timers[timer] = self._armed(timer)
        return timer

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            return
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ring() -> None:
            if not over.done():
                over.set_result(None)

        timer = self.call_at(self.now() + seconds, ring)
        try:
            await over
        finally:
            timer.cancel()

    async def work(self, seconds: float) -> None:
        """As `sleep`, after whatever else the process was given before: it does one thing at a time."""
        if seconds > 0:
            async with self._turn:
                await self.sleep(seconds)

    def pace_changed(self) -> None:
        """The cores give more or less. For `SharedCores`."""
        self._set_pace(self._cores.pace)
        for timer, handle in list(self._timers.items()):
            handle.cancel()
            self._timers[timer] = self._armed(timer)

    def dropped(self, timer: _Timer) -> None:
        """It is cancelled or over. For timers."""
        handle = self._timers.pop(timer, None)
        if handle is None:
            return
        handle.cancel()
        if not self._timers:
            self._set_pace(1.0)
            self._cores.changed(self, busy=False)

    def _set_pace(self, pace: float) -> None:
        self._read, self._read_at = self.now(), now()
        self._pace = pace

    def _armed(self, timer: _Timer) -> asyncio.TimerHandle:
        left = max(timer.when() - self.now(), 0.0) / self._pace
        return asyncio.get_running_loop().call_later(left, self._ring, timer)

    def _ring(self, timer: _Timer) -> None:
        # Whoever sets another one in the callback goes on computing: the cores hear only of the last.
        del self._timers[timer]
        timer.callback()
        if not self._timers:
            self._set_pace(1.0)
            self._cores.changed(self, busy=False)
