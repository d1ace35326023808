"""The LLM proxy alone: its service on one core, between clients and an engine that computes nothing.

    python -m tests.bench.proxy_alone [--seconds N] [--json]

The proxy's process has a core for itself; the engine's process and the clients share the others, and the
clients have several connections, as environment workers have.
"""

import argparse
import asyncio
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from infra.clock import now
from infra.processes import ServiceProcess
from infra.rpc import RpcClient, RpcError
from tests.bench.instant_engine import TOKENS
from tests.bench.rows import Row, at_least, at_most, table

CONNECTIONS, CONTEXT, TURNS = 4, 512, 8
RATE_TARGET = 2000  # generate requests a second
CONCURRENT = 64  # trajectories that ask for turn after turn
PACE = 200  # requests a second at which latency is measured
ADDED_TARGET_MS = 1.0
HELD, HOLD_S = 10_000, 5.0
Ask = Callable[[int], Awaitable[Any]]


@dataclass(slots=True)
class Stage:
    """What runs: the proxy and its clients, and connections straight to the engine."""

    proxy: ServiceProcess
    clients: list[RpcClient]
    engine: RpcClient

    @property
    def proxy_cpu_seconds(self) -> float:
        times = psutil.Process(self.proxy.process.pid).cpu_times()
        return float(times.user + times.system)

    @property
    def proxy_memory(self) -> int:
        return int(psutil.Process(self.proxy.process.pid).memory_info().rss)

    async def generate(self, trajectory: str, client: int, turn: int = 0) -> None:
        answer = await self.clients[client % CONNECTIONS].call(
            "generate",
            {"trajectory": trajectory, "domain": "bench", "initiating_version": 0, **_request(turn)},
        )
        assert len(answer["tokens"]) == 4 * TOKENS

    async def directly(self, turn: int) -> None:
        answer = await self.engine.call("generate", {"session": "direct", **_request(turn)})
        assert len(answer["tokens"]) == 4 * TOKENS

    async def finish(self, trajectories: list[str]) -> None:
        await self.clients[0].call("finish", {"trajectories": trajectories})


def _request(turn: int) -> dict[str, Any]:
    context = np.arange(CONTEXT, dtype="<i4").tobytes()
    return {"tokens": context, "max_new_tokens": TOKENS, "temperature": 1.0, "seed": turn}


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    core, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(others) or {core})
    token = secrets.token_urlsafe(16)
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        engine = await ServiceProcess.start(
            "engine", "tests.bench.instant_engine", {"token": token}, logs / "engine.log"
        )
        try:
            proxy = await ServiceProcess.start(
                "proxy",
                "tests.bench.pinned_proxy",
                {
                    "core": core,
                    "engines": [{"name": "engine-0", "url": engine.url, "token": token}],
                    "generate_limit_s": 600.0,
                    "token": token,
                },
                logs / "proxy.log",
            )
            try:
                direct = await RpcClient(engine.url, token=token).connect()
                clients = [await RpcClient(proxy.url, token=token).connect() for _ in range(CONNECTIONS)]
                yield Stage(proxy, clients, direct)
                for client in [*clients, direct]:
                    await client.close()
            finally:
                await proxy.stop()
        finally:
            await engine.stop()
            os.sched_setaffinity(0, {core, *others})


async def requests_per_second(on: Stage, seconds: float) -> tuple[float, float]:
    """Sustained turns a second of trajectories of `TURNS` turns, and the proxy's share of its core."""
    answered, over = 0, asyncio.Event()

    async def trajectories(index: int) -> None:
        nonlocal answered
        for episode in itertools.count():
            name = f"rate-{index}-{episode}"
            for turn in range(TURNS):
                await on.generate(name, index, turn)
                answered += 1
            await on.finish([name])
            if over.is_set():
                return

    running = [asyncio.create_task(trajectories(index)) for index in range(CONCURRENT)]
    await asyncio.sleep(1.0)
    before, cpu, began = answered, on.proxy_cpu_seconds, now()
    await asyncio.sleep(seconds)
    elapsed = now() - began
    rate, share = (answered - before) / elapsed, (on.proxy_cpu_seconds - cpu) / elapsed
    over.set()
    await asyncio.gather(*running)
    return rate, share


async def latencies(ask: Ask, requests: int) -> list[float]:
    """Seconds from question to answer of requests sent at `PACE`, whether or not others are under way."""
    begin = now()

    async def one(index: int) -> float:
        await asyncio.sleep(max(0.0, begin + index / PACE - now()))
        asked = time.perf_counter()  # the clock of uvloop's loop counts whole milliseconds
        await ask(index)
        return time.perf_counter() - asked

    return await asyncio.gather(*(one(index) for index in range(requests)))


async def added_latency(on: Stage, blocks: int) -> tuple[list[float], list[float]]:
    """Through the proxy, and straight to the engine: blocks of a second each, in turns."""
    through: list[float] = []
    direct: list[float] = []

    for block in range(blocks):

        async def ask(index: int, block: int = block) -> None:
            await on.generate(f"paced-{block}-{index}", index)

        through += await latencies(ask, PACE)
        direct += await latencies(on.directly, PACE)
        await on.finish([f"paced-{block}-{index}" for index in range(PACE)])
    return through, direct


async def hold_many(on: Stage) -> tuple[int, int, int]:
    """Trajectories answered, the most that were held at a time, and the bytes of memory that they took."""
    before = on.proxy_memory
    await on.engine.call("hold", {"hold_s": HOLD_S})
    names = [f"held-{index}" for index in range(HELD)]
    asking = asyncio.gather(
        *(on.generate(name, index) for index, name in enumerate(names)), return_exceptions=True
    )
    await asyncio.sleep(HOLD_S * 0.6)
    memory = on.proxy_memory - before
    answers = await asking
    most = await on.engine.call("hold", {"hold_s": 0.0})
    await on.finish(names)
    lost = [answer for answer in answers if isinstance(answer, RpcError)]
    return len(answers) - len(lost), int(most), memory


async def measure(seconds: float) -> list[Row]:
    async with stage() as on:
        rate, share = await requests_per_second(on, seconds)
        through, direct = await added_latency(on, blocks=5)
        answered, most, memory = await hold_many(on)
    medians = [1000 * statistics.median(side) for side in (through, direct)]
    tails = [1000 * statistics.quantiles(side, n=100)[98] for side in (through, direct)]
    return [
        at_least(
            "proxy alone, generate requests/s : target",
            rate,
            RATE_TARGET,
            1.0,
            f"{CONCURRENT} trajectories of {TURNS} turns on {CONNECTIONS} connections, {CONTEXT} tokens of "
            f"context, instant engine; {seconds:g} s; the proxy used {share:.2f} of its one core",
        ),
        at_most(
            "proxy alone, ms added at the median : target",
            medians[0] - medians[1],
            ADDED_TARGET_MS,
            1.0,
            f"{PACE} requests/s, {len(through)} each way in turns; medians {medians[0]:.2f} ms through the "
            f"proxy, {medians[1]:.2f} ms straight to the engine; 99th percentiles {tails[0]:.2f} and "
            f"{tails[1]:.2f} ms",
        ),
        at_least(
            "proxy alone, trajectories held and answered : target",
            min(answered, most),
            HELD,
            1.0,
            f"{HELD} requests, each held {HOLD_S:g} s by the engine: {most} at a time, {answered} answered, "
            f"{HELD - answered} lost, {memory / 2**20:.0f} MiB of the proxy's memory",
        ),
    ]


def in_own_process(seconds: float = 10.0) -> list[Row]:
    """The rows, measured by a process that has nothing else on its event loop."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.bench.proxy_alone", "--seconds", str(seconds), "--json"],
        check=True,
        capture_output=True,
    )
    return [Row(**row) for row in json.loads(run.stdout.splitlines()[-1])]


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0, help="of sustained load")
    parser.add_argument("--json", action="store_true", help="print the rows as one line of JSON")
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(measure(arguments.seconds))
    print(json.dumps([asdict(row) for row in rows]) if arguments.json else table(rows))
    if not arguments.json:
        print("\n".join(row.how for row in rows))


if __name__ == "__main__":
    main()
