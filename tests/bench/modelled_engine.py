"""How many turns a second modelled engines serve on virtual time.

`python -m tests.bench.modelled_engine [engines sessions turns]`: so many turns of so many sessions an engine,
Qwen3-8B on an H20 each, response lengths log-normal with median 245 and tools that take about 2 s. CPU
seconds, everything included that the engines' callers need.
"""

import asyncio
import random
import sys
import time
from collections.abc import Iterable

import numpy as np

from infra.clock import now
from infra.hardware import hardware
from infra.models import model_of
from infra.performance.iteration import IterationModel
from infra.virtual_time import run_virtual
from tasks.rollout.engines.base import GenerateRequest
from tasks.rollout.engines.modelled.engine import ModelledEngine
from tasks.rollout.engines.modelled.limits import EngineLimits

CONTEXT = np.ones(32768, np.int32)


async def serve(engines: int, sessions: int, turns: int) -> tuple[float, int, int]:
    """Virtual seconds, iterations and sampled tokens of all engines together."""
    timing = IterationModel(model_of("qwen3-8b"), hardware("h20"))
    lengths: dict[str, int] = {}

    async def pull(version: int) -> None: ...

    made = [
        ModelledEngine(
            timing=timing,
            limits=EngineLimits(256, 8192, 32768),
            response_tokens=lambda request: lengths[request.session],
            end_token=2,
            kv_tokens=timing.kv_tokens(),
            pull=pull,
            update_s=1.0,
        )
        for _ in range(engines)
    ]

    async def session(engine: ModelledEngine, name: str) -> None:
        draw = random.Random(name)
        context = draw.randint(200, 2000)
        await asyncio.sleep(draw.uniform(0, 5))
        for turn in range(turns):
            lengths[name] = max(1, int(draw.lognormvariate(5.5, 0.8)))
            done = await engine.generate(GenerateRequest(name, CONTEXT[:context], 4096, 1.0, turn))
            context += len(done.tokens) + draw.randint(20, 400)
            await asyncio.sleep(draw.lognormvariate(0.5, 1))

    await asyncio.gather(
        *[session(engine, f"{index}-{more}") for index, engine in enumerate(made) for more in range(sessions)]
    )
    stats = [await engine.stats() for engine in made]
    return now(), sum(one.steps for one in stats), sum(one.decode_tokens for one in stats)


def main(arguments: Iterable[str]) -> None:
    engines, sessions, turns = [int(argument) for argument in arguments] or [100, 64, 10]
    began = time.process_time()
    seconds, iterations, tokens = run_virtual(serve(engines, sessions, turns))
    spent = time.process_time() - began
    count = engines * sessions * turns
    print(
        f"{engines} engines, {count} turns, {tokens} tokens, {iterations} iterations, {seconds:.0f} virtual s"
    )
    print(f"{spent:.2f} CPU s, {count / spent:.0f} turns/s, {iterations / spent:.0f} iterations/s")


if __name__ == "__main__":
    main(sys.argv[1:])
