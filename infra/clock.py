"""The one clock. Control-plane code takes time from the running event loop and from nowhere else,

so that the same code runs in real time and, on a virtual-time event loop, in simulation.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from infra.virtual_time import VirtualTimeLoop


def now() -> float:
    """Seconds on the running event loop's monotonic clock."""
    return asyncio.get_running_loop().time()


def wall() -> float:
    """Seconds since 1970, for what processes and hosts compare with one another: a lease's heartbeat.

    On a virtual-time loop 1970 is when the loop was made, so that nothing depends on when it is run.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # in a thread without one
        return time.time()
    return loop.time() if isinstance(loop, VirtualTimeLoop) else time.time()


class Timer(Protocol):
    """What `call_at` sets."""

    def cancel(self) -> None: ...

    def cancelled(self) -> bool: ...

    def when(self) -> float: ...


class Clock(Protocol):
    """The time of something that computes: that of the event loop, or slower where it shares its cores."""

    def now(self) -> float:
        """Seconds of its own; they never go back."""

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call back at this time of its own. It computes for as long as something is set."""

    async def sleep(self, seconds: float) -> None:
        """Compute for so many seconds of its own."""


class LoopClock:
    """The event loop's."""

    def now(self) -> float:
        return now()

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_at(when, callback)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


LOOP_CLOCK = LoopClock()
