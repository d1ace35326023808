"""What it costs to dispatch a stage to a work pool: `python -m tests.bench.pool_dispatch`, on a cluster.

A stage that does next to nothing is called as the campaign calls its own: over the host's connection, as a
task run of the host's flow run. The figure is the whole call without the seconds inside of the service.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path

from prefect import flow

from flows.pools import pool_launcher
from infra.launcher import Service
from tasks.campaign import PoolsConfig

POOLS = PoolsConfig(rollout=("cpu",), train="cpu", environment="cpu", reward="cpu", queue="interactive")


async def repeat(service: Service, stages: int) -> None:
    for number in range(stages):
        await service.call("stats", stage=f"dispatch {number}")


@flow(name="pool-dispatch")
async def measure(stages: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a stage, of the best repeat."""
    medians, slowest = [], []
    async with pool_launcher(POOLS, "pool-dispatch") as launcher:
        (host,) = launcher.hosts
        with tempfile.TemporaryDirectory() as folder:
            settings = {"token": "bench", "engines": [], "generate_limit_s": 1.0}
            log = Path(folder) / "proxy.log"
            service = await launcher.start("cpu", "proxy", "tasks.rollout.proxy_service", settings, log)
            await repeat(service, 3)  # the first ones find nothing warm
            for _ in range(repeats):
                host.dispatch_seconds.clear()
                await repeat(service, stages)
                milliseconds = sorted(1000 * seconds for seconds in host.dispatch_seconds)
                medians.append(statistics.median(milliseconds))
                slowest.append(milliseconds[int(0.95 * (len(milliseconds) - 1))])
            await service.stop()
    best = medians.index(min(medians))
    return {"median_ms": round(medians[best], 1), "p95_ms": round(slowest[best], 1), "stages": stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(measure(arguments.stages, arguments.repeats))))


if __name__ == "__main__":
    main()
