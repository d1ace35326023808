"""The proxy over real connections, with engines on the wire that answer what the test says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from infra.rpc import RpcError
from tasks.rollout.proxy import LLMProxy
from tasks.rollout.routing import Router
from tasks.rollout.worker_life import WorkerPhase
from tasks.rollout.workers import EngineAddress, WorkerLimits
from tasks.trajectory import StopReason
from tests.rollout.scripted_engine import ScriptedEngine


@asynccontextmanager
async def proxied(
    engines: int = 2, limit_s: float = 5.0, limits: WorkerLimits | None = None, **options: Any
) -> AsyncIterator[tuple[LLMProxy, list[ScriptedEngine]]]:
    proxy = LLMProxy(Router(), limit_s, limits=limits, **options)
    scripted = [ScriptedEngine() for _ in range(engines)]
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
        await proxy.updates.suspend()
        held = asyncio.create_task(proxy.generate(turn()))
        await asyncio.sleep(0.05)
        assert not held.done()
        assert all(engine.count("generate") == 0 for engine in engines)
        await proxy.updates.load_weights(4)
        await proxy.updates.resume()
        await held
        assert [name for name, _ in engines[0].commands] == ["suspend", "load_weights", "resume", "generate"]


async def test_a_held_turn_that_became_too_old_meanwhile_is_refused_on_resume() -> None:
    async with proxied() as (proxy, _):
        await proxy.updates.suspend()
        held = asyncio.create_task(proxy.generate(turn(version=1)))
        await asyncio.sleep(0)
        proxy.set_oldest_admissible(2)
        await proxy.updates.resume()
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
        await proxy.updates.suspend()
        await proxy.updates.resume()


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
        await proxy.updates.suspend()
        await proxy.updates.load_weights(1)
        await proxy.updates.resume()
        await proxy.generate(turn())
        assert [engine.count("generate") for engine in engines] == [0, 1]
        engines[1].refuses_weights = True
        assert await code_of(proxy.updates.load_weights(2)) == "update_failed"


async def running_on(engines: list[ScriptedEngine], count: int = 1) -> list[int]:
    """Wait until so many turns have been asked for; the engines that were."""
    await until(lambda: sum(engine.count("generate") for engine in engines) >= count)
    return [index for index, engine in enumerate(engines) if engine.count("generate")]


async def until(holds: Any) -> None:
    async with asyncio.timeout(20):
        while True:
            if holds():
                return
            await asyncio.sleep(0.005)


async def test_a_lost_turn_goes_on_from_what_was_reported_and_counts() -> None:
    async with proxied() as (proxy, engines):
        for engine in engines:
            engine.let.clear()
        lost = asyncio.create_task(proxy.generate(turn()))
        (index,) = await running_on(engines)
        await engines[index].report("t", [21, 22])
        await until(lambda: proxy.reported_tokens == 2)
        other = engines[1 - index]
        other.let.set()
        await engines[index].server.stop()
        answer = await lost
        request = other.last("generate")
        assert np.frombuffer(request["tokens"], "<i4").tolist() == [1, 21, 22]
        assert (request["max_new_tokens"], request["sampled_before"], request["seed"]) == (2, 2, 7)
        assert np.frombuffer(answer["tokens"], "<i4").tolist() == [21, 22, 1, 21, 22]
        assert proxy.counts["continued_turns"] == 1
        assert proxy.counts["kept_tokens"] == 2


async def test_a_continued_turn_that_became_too_old_is_refused() -> None:
    async with proxied() as (proxy, engines):
        engines[0].let.clear()
        lost = asyncio.create_task(proxy.generate(turn(version=1)))
        await running_on(engines)
        await engines[0].report("t", [21])
        proxy.set_oldest_admissible(2)
        await engines[0].server.stop()
        assert await code_of(lost) == "stale"
        assert engines[1].count("generate") == 0


async def test_a_worker_that_answers_no_heart_beat_is_lost_and_its_turns_go_on_elsewhere() -> None:
    async with proxied(limits=WorkerLimits(heartbeat_s=1.5)) as (proxy, engines):
        engines[0].let.clear()
        lost = asyncio.create_task(proxy.generate(turn()))
        await running_on(engines)
        engines[0].beats.clear()
        await until(lambda: proxy.workers.phases()["engine-0"] is WorkerPhase.SUSPECTED)
        assert (await lost)["stop"] == "stop"
        assert engines[1].count("generate") == 1
        assert proxy.workers.phases()["engine-0"] is WorkerPhase.SET_ASIDE


async def test_a_worker_that_does_not_carry_out_a_command_is_lost() -> None:
    async with proxied(limits=WorkerLimits(command_s=1.0)) as (proxy, engines):
        engines[1].obeys.clear()
        await proxy.updates.suspend()
        await proxy.updates.load_weights(1)
        await proxy.updates.resume()
        assert proxy.workers.serving == ["engine-0"]
        await proxy.abort(["t"], StopReason.CANCELLED)
        assert await proxy.updates.recompute() == 3


async def test_turns_wait_for_a_worker_that_is_started_again_and_it_joins_at_the_served_version() -> None:
    async with proxied(engines=1, limits=WorkerLimits(restarts=1)) as (proxy, engines):
        await engines[0].server.stop()
        losses = await proxy.workers.losses()
        assert (list(losses.restart), losses.set_aside, losses.left) == (["engine-0"], {}, True)
        waiting = asyncio.create_task(proxy.generate(turn()))
        # An update with nobody there: whoever joins takes it first.
        await proxy.updates.suspend()
        await proxy.updates.load_weights(4)
        again = ScriptedEngine()
        address = EngineAddress("engine-0", await again.server.start())
        await proxy.updates.join(address)
        assert [name for name, _ in again.commands] == ["suspend", "stats", "load_weights"]
        assert not waiting.done()
        await proxy.updates.resume()
        await waiting
        assert again.version == 4
        assert [name for name, _ in again.commands][3:] == ["resume", "generate"]
        await again.server.stop()


async def test_a_worker_that_cannot_take_the_served_version_does_not_join() -> None:
    async with proxied(engines=1, version=3) as (proxy, _):
        broken = ScriptedEngine()
        broken.refuses_weights = True
        address = EngineAddress("engine-1", await broken.server.start())
        assert await code_of(proxy.updates.join(address)) == "weights_rejected"
        assert proxy.workers.serving == ["engine-0"]
        await broken.server.stop()


async def test_an_update_during_a_joining_is_not_missed() -> None:
    async with proxied(engines=1) as (proxy, _):
        newcomer = ScriptedEngine()
        newcomer.obeys.clear()
        address = EngineAddress("engine-1", await newcomer.server.start())
        joining = asyncio.create_task(proxy.updates.join(address))
        await until(lambda: newcomer.count("suspend") == 1)
        await proxy.updates.suspend()
        await proxy.updates.load_weights(1)
        await proxy.updates.resume()
        newcomer.obeys.set()
        await joining
        assert newcomer.version == 1
        assert [name for name, _ in newcomer.commands][-1] == "resume"
        assert proxy.workers.serving == ["engine-0", "engine-1"]
        await newcomer.server.stop()


async def test_failing_turns_set_a_worker_aside_but_bad_requests_do_not() -> None:
    async with proxied() as (proxy, engines):
        engines[0].fails_with = RpcError("invalid_request", "no token")
        for _ in range(4):
            assert await code_of(proxy.generate(turn())) == "generation_failed"
        assert len(proxy.workers.serving) == 2
        engines[0].fails_with = RpcError("engine_failed", "non-finite logits")
        for _ in range(3):
            assert await code_of(proxy.generate(turn())) == "generation_failed"
        assert proxy.workers.serving == ["engine-1"]
        assert (await proxy.generate(turn()))["stop"] == "stop"


async def test_a_worker_that_answers_heart_beats_but_ends_no_turn_is_lost_too() -> None:
    async with proxied(limit_s=0.5) as (proxy, engines):
        engines[0].let.clear()
        for _ in range(3):
            with pytest.raises(RpcError, match="generate_limit_s"):
                await proxy.generate(turn())
        assert proxy.workers.serving == ["engine-1"]
        assert (await proxy.generate(turn()))["stop"] == "stop"


async def test_a_turn_that_an_earlier_proxy_left_behind_is_aborted_first() -> None:
    async with proxied(engines=1) as (proxy, engines):
        engines[0].busy_sessions.add("t")
        assert (await proxy.generate(turn()))["stop"] == "stop"
        assert [name for name, _ in engines[0].commands] == ["generate", "abort", "generate"]


async def test_a_trajectorys_second_turn_takes_the_place_of_one_that_nobody_waits_for() -> None:
    async with proxied(engines=1) as (proxy, engines):
        engines[0].let.clear()
        first = asyncio.create_task(proxy.generate(turn()))
        await running_on(engines)
        second = asyncio.create_task(proxy.generate(turn()))
        assert await code_of(first) == "superseded"
        engines[0].let.set()
        assert (await second)["stop"] == "stop"


async def test_trajectories_that_never_finish_are_forgotten_in_the_end() -> None:
    async with proxied(engines=1, max_open=10) as (proxy, _):
        for index in range(25):
            await proxy.generate(turn(f"t{index}"))
        assert proxy.open_trajectories == 10
        assert len(proxy.workers.serving) == 1
        await proxy.finish([f"t{index}" for index in range(25)])
        assert proxy.open_trajectories == 0


async def test_a_finished_trajectory_on_a_lost_worker_disturbs_nobody() -> None:
    async with proxied() as (proxy, engines):
        await proxy.generate(turn("a"))
        await proxy.generate(turn("b"))
        await engines[0].server.stop()
        await proxy.finish(["a", "b"])
        assert engines[1].last("end_sessions") == {"sessions": ["b"]}
        assert proxy.open_trajectories == 0
