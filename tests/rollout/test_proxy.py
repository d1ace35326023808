"""The proxy over real connections, with engines on the wire that answer what the test says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from infra.rpc import RpcConnection, RpcError, RpcServer
from tasks.rollout.proxy import EngineAddress, LLMProxy
from tasks.rollout.routing import Router
from tasks.trajectory import StopReason


class ScriptedEngine:
    """An engine's server: records every command, and generates when it is let."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, Any]] = []
        self.let = asyncio.Event()
        self.let.set()
        self.refuses_weights = False
        methods = ("abort", "end_sessions", "suspend", "resume", "load_weights", "stats")
        self.server = RpcServer({"generate": self.generate, **{name: self._record(name) for name in methods}})

    def _record(self, name: str) -> Any:
        async def handler(payload: Any, _: RpcConnection) -> dict[str, Any]:
            self.commands.append((name, payload))
            if name == "load_weights" and self.refuses_weights:
                raise RpcError("weights_rejected", "truncated bucket")
            return {}

        return handler

    async def generate(self, payload: Any, _: RpcConnection) -> dict[str, Any]:
        self.commands.append(("generate", payload))
        await self.let.wait()
        return {"tokens": payload["tokens"], "logprobs": b"", "versions": b"", "stop": "stop"}

    def count(self, name: str) -> int:
        return sum(1 for command, _ in self.commands if command == name)


@asynccontextmanager
async def proxied(
    engines: int = 2, limit_s: float = 5.0
) -> AsyncIterator[tuple[LLMProxy, list[ScriptedEngine]]]:
    proxy, scripted = LLMProxy(Router(), limit_s), [ScriptedEngine() for _ in range(engines)]
    for index, engine in enumerate(scripted):
        await proxy.add_engine(EngineAddress(f"engine-{index}", await engine.server.start()))
    try:
        yield proxy, scripted
    finally:
        await proxy.close()
        for engine in scripted:
            await engine.server.stop()


def turn(trajectory: str = "t", version: int | None = 0) -> dict[str, Any]:
    return {
        "trajectory": trajectory,
        "domain": "math",
        "tokens": b"\x01\0\0\0",
        "max_new_tokens": 4,
        "temperature": 1.0,
        "seed": 7,
        "initiating_version": version,
    }


async def code_of(call: Any) -> str:
    with pytest.raises(RpcError) as raised:
        await call
    return raised.value.code


async def test_turns_of_a_trajectory_stay_on_one_engine_and_pass_through_unchanged() -> None:
    async with proxied() as (proxy, engines):
        for _ in range(3):
            assert (await proxy.generate(turn()))["tokens"] == b"\x01\0\0\0"
        await proxy.generate(turn("other"))
        assert [engine.count("generate") for engine in engines] == [3, 1]
        name, payload = engines[0].commands[0]
        assert (name, payload["session"], payload["seed"]) == ("generate", "t", 7)


async def test_a_turn_of_a_trajectory_that_is_too_old_is_refused_and_evaluation_never_is() -> None:
    async with proxied() as (proxy, engines):
        proxy.set_oldest_admissible(3)
        assert await code_of(proxy.generate(turn(version=2))) == "stale"
        await proxy.generate(turn(version=3))
        await proxy.generate(turn("evaluation", version=None))
        assert sum(engine.count("generate") for engine in engines) == 2


async def test_suspend_holds_new_turns_back_until_resume() -> None:
    async with proxied() as (proxy, engines):
        await proxy.suspend()
        held = asyncio.create_task(proxy.generate(turn()))
        await asyncio.sleep(0.05)
        assert not held.done()
        assert all(engine.count("generate") == 0 for engine in engines)
        await proxy.load_weights(4)
        await proxy.resume()
        await held
        assert [name for name, _ in engines[0].commands] == ["suspend", "load_weights", "resume", "generate"]


async def test_a_held_turn_that_became_too_old_meanwhile_is_refused_on_resume() -> None:
    async with proxied() as (proxy, _):
        await proxy.suspend()
        held = asyncio.create_task(proxy.generate(turn(version=1)))
        await asyncio.sleep(0)
        proxy.set_oldest_admissible(2)
        await proxy.resume()
        assert await code_of(held) == "stale"


async def test_an_aborted_trajectory_gets_no_further_turn_until_it_is_finished() -> None:
    async with proxied() as (proxy, engines):
        await proxy.abort(["t"], StopReason.CANCELLED)
        assert engines[0].commands == [("abort", {"sessions": ["t"], "reason": "cancelled"})]
        assert await code_of(proxy.generate(turn())) == "cancelled"
        await proxy.finish(["t"])
        await proxy.generate(turn())


async def test_a_finished_trajectorys_cache_is_dropped_where_it_lies() -> None:
    async with proxied() as (proxy, engines):
        await proxy.generate(turn("a"))
        await proxy.generate(turn("b"))
        await proxy.finish(["a", "b", "never seen"])
        assert [engine.commands[-1] for engine in engines] == [
            ("end_sessions", {"sessions": ["a"]}),
            ("end_sessions", {"sessions": ["b"]}),
        ]


async def test_a_turn_lost_with_its_engine_is_generated_on_another() -> None:
    async with proxied() as (proxy, engines):
        engines[0].let.clear()
        lost = asyncio.create_task(proxy.generate(turn()))
        await asyncio.sleep(0.05)
        await engines[0].server.stop()
        assert (await lost)["stop"] == "stop"
        assert engines[1].count("generate") == 1
        await proxy.suspend()
        await proxy.resume()


async def test_with_no_engine_left_the_turn_fails_with_a_reason() -> None:
    async with proxied(engines=1) as (proxy, engines):
        await engines[0].server.stop()
        await asyncio.sleep(0.05)
        assert await code_of(proxy.generate(turn())) == "generation_failed"


async def test_a_generation_without_end_is_given_up() -> None:
    async with proxied(engines=1, limit_s=0.05) as (proxy, engines):
        engines[0].let.clear()
        with pytest.raises(RpcError, match="generate_limit_s"):
            await proxy.generate(turn())


async def test_an_engine_that_cannot_take_the_weights_is_set_aside_and_none_left_is_an_error() -> None:
    async with proxied() as (proxy, engines):
        engines[0].refuses_weights = True
        await proxy.suspend()
        await proxy.load_weights(1)
        await proxy.resume()
        await proxy.generate(turn())
        assert [engine.count("generate") for engine in engines] == [0, 1]
        engines[1].refuses_weights = True
        assert await code_of(proxy.load_weights(2)) == "update_failed"
