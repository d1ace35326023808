"""What the processes of a run on this machine compute, read while it runs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil

from infra.clock import now
from tasks.session import Session

PROCESSES = {
    "engine": "tasks.rollout.engines.service",
    "proxy": "tasks.rollout.proxy_service",
    "trainer": "tasks.train.service",
    "host": "tasks.environment.host",
}
"""Roles, by the module that their process runs. Dask's worker is `worker`, this process `control`."""
_DASK_WORKER = "spawn_main"
_LAST = "host"  # the process that comes up last, with the first trajectory


@dataclass(frozen=True, slots=True)
class Reading:
    """Since the processes began."""

    at: float  # seconds, of the event loop
    step: int  # train steps done
    cpu: Mapping[str, float]  # CPU seconds by role
    counters: Mapping[str, float]  # `RolloutFleet.counters`, of all engines


@asynccontextmanager
async def taking_readings(session: Session, every_s: float = 0.1) -> AsyncIterator[list[Reading]]:
    """Read while the context is open, and at the end of each step; the list grows."""
    readings: list[Reading] = []
    roles: dict[psutil.Process, str] = {}

    async def read() -> None:
        if _LAST not in roles.values():
            roles.update(
                (process, role)
                for process in _family()
                if process not in roles and (role := _role(process)) is not None
            )
        counters = await session.fleet.counters()
        readings.append(Reading(now(), session.step, _cpu(roles), counters))

    async def read_for_ever() -> None:
        while True:
            await read()
            await asyncio.sleep(every_s)

    async def at_step(_: object) -> None:
        await read()

    session.observers.append(at_step)
    reading = asyncio.create_task(read_for_ever())
    try:
        yield readings
        await read()
    finally:
        session.observers.remove(at_step)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading


def between(readings: Sequence[Reading], first: int, last: int) -> tuple[Reading, Reading]:
    """The readings at which these many steps had just been done."""
    begin = next(reading for reading in readings if reading.step >= first)
    end = next((reading for reading in readings if reading.step >= last), readings[-1])
    return begin, end


def _family() -> list[psutil.Process]:
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def _role(process: psutil.Process) -> str | None:
    if process.pid == psutil.Process().pid:
        return "control"
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return None
    for role, module in PROCESSES.items():
        if module in line.split():
            return role
    return "worker" if _DASK_WORKER in line else None


def _cpu(roles: Mapping[psutil.Process, str]) -> dict[str, float]:
    seconds = dict.fromkeys(roles.values(), 0.0)
    for process, role in roles.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds[role] += times.user + times.system
    return seconds
