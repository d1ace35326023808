"""One prefill worker and one decoding worker against two that do both: the same turns, the same proxy.

Some trajectories decode long turns from short contexts; beside them, others keep bringing contexts of 400
tokens and sample little. A prefill that shares an engine with running decodes holds these up for its length.
"""

import asyncio
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infra.processes import ServiceProcess
from infra.rpc import RpcClient
from tasks.rollout.proxy import LLMProxy
from tasks.rollout.routing import Router, WorkerRole
from tasks.rollout.workers import EngineAddress
from tests.bench.rows import Row, at_most

TOKEN = "of the benchmark"
VOCABULARY = 100
LONG_TURNS, LONG_SAMPLED = 8, 400
BURSTS, AT_ONCE, CONTEXT, SAMPLED = 48, 4, 400, 8
_REPORT_S = 0.001  # how often engines tell what they sampled: the resolution of what is measured
COLOCATED: tuple[WorkerRole, ...] = ("both", "both")
DISAGGREGATED: tuple[WorkerRole, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Load:
    p95_s: float  # between two tokens of a long turn
    total_s: float  # until all turns are over


class TimedProxy(LLMProxy):
    """Notes when each turn's tokens are reported."""

    def __init__(self, min_prefill_tokens: int):
        super().__init__(Router(), 600.0, min_prefill_tokens=min_prefill_tokens)
        self.reported: dict[str, list[float]] = defaultdict(list)

    def _on_notice(self, client: RpcClient, name: str, payload: Any) -> None:
        super()._on_notice(client, name, payload)
        if name == "sampled":
            self.reported[payload["session"]].append(time.perf_counter())


async def rows(model: Path, repeats: int) -> list[Row]:
    """Of 2.2M Llama workers with a thread each, in turns; the best run of each side."""
    loads: dict[tuple[WorkerRole, ...], list[Load]] = {DISAGGREGATED: [], COLOCATED: []}
    for _ in range(repeats):
        for roles, found in loads.items():
            found.append(await _measure(model, roles))
    ours, theirs = loads[DISAGGREGATED], loads[COLOCATED]
    how = (
        f"{LONG_TURNS} turns of {LONG_SAMPLED} tokens beside {BURSTS} with contexts of {CONTEXT} that sample "
        f"{SAMPLED}, {AT_ONCE} at once; 2.2M Llama, 2 workers of 1 thread; best of {repeats} runs in turns"
    )
    return [
        at_most(
            "1 prefill + 1 decode : 2 colocated, p95 between two tokens",
            min(load.p95_s for load in ours),
            min(load.p95_s for load in theirs),
            1.0,
            how,
        ),
        at_most(
            "1 prefill + 1 decode : 2 colocated, s for all turns",
            min(load.total_s for load in ours),
            min(load.total_s for load in theirs),
            1.0,
            how,
        ),
    ]


async def _measure(model: Path, roles: tuple[WorkerRole, ...]) -> Load:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        proxy = TimedProxy(min_prefill_tokens=128)
        services = []
        for index, role in enumerate(roles):
            services.append(await _start(model, folder, f"{role}-{index}", role))
            stack.push_async_callback(services[-1].stop)
        for role, service in zip(roles, services, strict=True):
            await proxy.add_engine(EngineAddress(service.name, service.url, TOKEN, "default", role))
        stack.push_async_callback(proxy.close)
        await asyncio.gather(*(_turn(proxy, f"warm-{index}", CONTEXT, 4) for index in range(4)))
        proxy.reported.clear()
        began = time.perf_counter()
        gate = asyncio.Semaphore(AT_ONCE)

        async def burst(index: int) -> None:
            async with gate:
                await _turn(proxy, f"burst-{index}", CONTEXT, SAMPLED)
                await proxy.finish([f"burst-{index}"])

        await asyncio.gather(
            *(_turn(proxy, f"long-{index}", 16, LONG_SAMPLED) for index in range(LONG_TURNS)),
            *(burst(index) for index in range(BURSTS)),
        )
        total = time.perf_counter() - began
        gaps = [np.diff(times) for session, times in proxy.reported.items() if session.startswith("long")]
        return Load(float(np.quantile(np.concatenate(gaps), 0.95)), total)


async def _start(model: Path, folder: Path, name: str, role: WorkerRole) -> ServiceProcess:
    return await ServiceProcess.start(
        name,
        "tasks.rollout.engines.service",
        {
            "model": str(model),
            "engine": {"kind": "torch", "max_running": 32, "max_sessions": 64},
            "weights": {"url": str(folder / "weights")},
            "max_context": 512,
            "role": role,
            "progress_every_s": _REPORT_S,
            "token": TOKEN,
        },
        folder / f"{name}.log",
        environment={"OMP_NUM_THREADS": "1"},
    )


async def _turn(proxy: LLMProxy, trajectory: str, context: int, count: int) -> None:
    """An end token, which a random policy samples now and then, is not the end: a next turn goes on."""
    seed = int.from_bytes(trajectory.encode()[-6:], "little")
    tokens = np.random.default_rng(seed).integers(10, VOCABULARY, context)
    left = count
    while left > 0:
        answer = await proxy.generate(
            {
                "trajectory": trajectory,
                "domain": "bench",
                "tokens": tokens.astype("<i4").tobytes(),
                "max_new_tokens": left,
                "temperature": 1.0,
                "seed": seed + left,
                "initiating_version": None,
            }
        )
        sampled = np.frombuffer(answer["tokens"], "<i4")
        tokens = np.concatenate([tokens, sampled])
        left -= len(sampled)
