"""The one clock. Control-plane code takes time from the running event loop and from nowhere else,

so that the same code runs in real time and, on a virtual-time event loop, in simulation.
"""

import asyncio
import time


def now() -> float:
    """Seconds on the running event loop's monotonic clock."""
    return asyncio.get_running_loop().time()


def wall() -> float:
    """Seconds since 1970, for what processes and hosts compare with one another: a lease's heartbeat."""
    return time.time()
