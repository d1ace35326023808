"""Reports of a real engine over a real connection."""

import asyncio
from typing import Any

import numpy as np
import pytest

from infra.rpc import RpcClient, RpcError, RpcServer
from tasks.rollout.engines.client import RemoteEngine
from tasks.rollout.engines.progress import ProgressReports
from tasks.rollout.engines.service import engine_handlers
from tests.rollout.engines.tiny_models import MAX_CONTEXT, make_engine, request


async def served(every_s: float, body: Any) -> list[dict[str, Any]]:
    """What is reported while `body(engine, reported)` runs."""
    reported: list[dict[str, Any]] = []
    async with make_engine() as engine:
        reports = ProgressReports(engine, every_s)
        running = asyncio.create_task(reports.run())
        server = RpcServer(engine_handlers(engine, reports))
        client = await RpcClient(await server.start()).connect(
            on_notice=lambda name, payload: reported.append({"name": name, **payload})
        )
        await body(RemoteEngine(client), reported)
        await client.close()
        running.cancel()
        await server.stop()
    return reported


async def test_increments_are_the_beginning_of_what_is_answered() -> None:
    answers = {}

    async def body(engine: RemoteEngine, reported: list[dict[str, Any]]) -> None:
        count = MAX_CONTEXT - 3
        running = {
            name: asyncio.create_task(engine.generate(request(name, (5, 9, 11), count, seed=seed)))
            for seed, name in enumerate("ab")
        }
        async with asyncio.timeout(30):
            while len(reported) < 6:
                # Frozen time and again, so that a quick engine is seen at work by a slow clock.
                await engine.suspend()
                await asyncio.sleep(0.02)
                if all(task.done() for task in running.values()):
                    break
                await engine.resume()
        await engine.resume()
        answers.update({name: await task for name, task in running.items()})

    reported = await served(0.004, body)
    assert {each["name"] for each in reported} <= {"sampled"}
    for name, answer in answers.items():
        mine = [each for each in reported if each["session"] == name]
        assert mine
        for field, kind, whole in (
            ("tokens", "<i4", answer.tokens),
            ("logprobs", "<f4", answer.logprobs),
            ("versions", "<i4", answer.versions),
        ):
            found = np.concatenate([np.frombuffer(each[field], kind) for each in mine])
            assert found.tolist() == whole[: len(found)].tolist()
            assert len(found) < len(whole)
        ends = np.cumsum([len(each["tokens"]) // 4 for each in mine])
        assert [each["start"] for each in mine] == [0, *ends[:-1].tolist()]


async def test_turns_shorter_than_the_interval_are_not_reported() -> None:
    async def body(engine: RemoteEngine, _: list[dict[str, Any]]) -> None:
        await asyncio.gather(*(engine.generate(request(f"s{i}", count=4, seed=i)) for i in range(8)))

    assert await served(30.0, body) == []


async def test_a_refused_second_request_leaves_the_first_ones_reports_alone() -> None:
    async def body(engine: RemoteEngine, reported: list[dict[str, Any]]) -> None:
        running = asyncio.create_task(engine.generate(request("s", (5, 9, 11), MAX_CONTEXT - 3)))
        await asyncio.sleep(0)
        await engine.suspend()
        with pytest.raises(RpcError, match="session_busy"):
            await engine.generate(request("s"))
        async with asyncio.timeout(30):
            while not reported:
                await engine.resume()
                await engine.suspend()
                await asyncio.sleep(0.02)
        await engine.resume()
        await running

    assert await served(0.004, body)
