"""Events per second of the virtual-time loop against SimPy, on one and the same model: an M/M/c queue.

`python -m tests.bench.virtual_time` prints the row. Both walk the same customers with the same draws, each a
process that waits for one of `SERVERS` servers and keeps it for its service, so they agree on every wait.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import simpy

from infra.clock import now
from infra.virtual_time import run_virtual
from tests.bench.rows import Row, at_least, table

CUSTOMERS, SERVERS, UTILISATION = 10_000, 10, 0.9
EVENTS_OF_A_CUSTOMER = 3
"""Its arrival, the beginning of its service, and its departure."""


@dataclass(frozen=True, slots=True)
class Customers:
    gaps: list[float]  # seconds between arrivals
    services: list[float]  # seconds, of mean 1

    @classmethod
    def draw(cls, count: int, seed: int = 0) -> "Customers":
        generator = random.Random(seed)
        rate = SERVERS * UTILISATION
        return cls(
            [generator.expovariate(rate) for _ in range(count)],
            [generator.expovariate(1.0) for _ in range(count)],
        )


def waits_on_virtual_time(customers: Customers) -> list[float]:
    """Seconds that each customer waits for a server, in the order in which service begins."""
    waits: list[float] = []

    async def main() -> None:
        servers = asyncio.Semaphore(SERVERS)

        async def customer(service: float) -> None:
            came = now()
            async with servers:
                waits.append(now() - came)
                await asyncio.sleep(service)

        async with asyncio.TaskGroup() as group:
            for gap, service in zip(customers.gaps, customers.services, strict=True):
                await asyncio.sleep(gap)
                group.create_task(customer(service))

    run_virtual(main())
    return waits


def waits_on_simpy(customers: Customers) -> list[float]:
    """The same with SimPy."""
    waits: list[float] = []
    environment = simpy.Environment()
    servers = simpy.Resource(environment, SERVERS)

    def customer(service: float) -> simpy.events.ProcessGenerator:
        came = environment.now
        with servers.request() as request:
            yield request
            waits.append(environment.now - came)
            yield environment.timeout(service)

    def arrivals() -> simpy.events.ProcessGenerator:
        for gap, service in zip(customers.gaps, customers.services, strict=True):
            yield environment.timeout(gap)
            environment.process(customer(service))

    environment.process(arrivals())
    environment.run()
    return waits


def events_per_second(run: Callable[[Customers], list[float]], customers: Customers) -> float:
    """Of a core."""
    started = time.process_time()
    run(customers)
    return EVENTS_OF_A_CUSTOMER * len(customers.gaps) / (time.process_time() - started)


def measure(repeats: int = 5, count: int = CUSTOMERS) -> Row:
    """Best of `repeats`, in turns."""
    customers = Customers.draw(count)
    ours, reference = 0.0, 0.0
    for _ in range(repeats):
        ours = max(ours, events_per_second(waits_on_virtual_time, customers))
        reference = max(reference, events_per_second(waits_on_simpy, customers))
    return at_least(
        "virtual-time loop : SimPy, events/s",
        ours,
        reference,
        0.5,
        f"M/M/{SERVERS} at {UTILISATION}, {count} customers of 3 events; best of {repeats}, in turns",
    )


if __name__ == "__main__":
    print(table([measure()]))
