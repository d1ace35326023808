"""Recovery beside a proxy on the wire that says what the test wants."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from infra.rpc import RpcConnection, RpcServer
from tasks.rollout.recovery import Recovery, RolloutLost
from tasks.rollout.worker_life import RestartBudget

NO_LOSSES: dict[str, Any] = {"restart": {}, "set_aside": {}, "left": True}


class ScriptedProxy:
    """Tells the losses that are put into its queue."""

    def __init__(self) -> None:
        self.losses: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.beats = asyncio.Event()
        self.beats.set()
        self.server = RpcServer({"lost_workers": self.lost_workers, "ping": self.ping}, token="secret")

    async def lost_workers(self, _: Any, __: RpcConnection) -> dict[str, Any]:
        return {**NO_LOSSES, **await self.losses.get()}

    async def ping(self, _: Any, __: RpcConnection) -> None:
        await self.beats.wait()


class Proxy:
    name = "proxy"
    ready: dict[str, Any] = {}

    def __init__(self, url: str):
        self.url = url


class RecordingFleet:
    """Carries out nothing but the start of another proxy, and records what it is told."""

    token = "secret"

    def __init__(self) -> None:
        self.done: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.scripted = ScriptedProxy()
        self.fails: set[str] = set()
        self.proxies = 0

    async def start(self) -> None:
        self.scripted = ScriptedProxy()
        self.proxy: Any = Proxy(await self.scripted.server.start())
        self.proxies += 1

    async def restart_engine(self, name: str) -> None:
        if name in self.fails:
            raise RuntimeError("no such model")
        self.done.put_nowait(("restarted", name))

    async def stop_engine(self, name: str) -> None:
        self.done.put_nowait(("stopped", name))

    async def restart_proxy(self) -> None:
        await self.scripted.server.stop()
        await self.start()
        self.done.put_nowait(("restarted", "proxy"))

    async def tell_proxy(self, method: str, payload: Any) -> None:
        self.done.put_nowait((method, payload["why"]))


@asynccontextmanager
async def recovering(
    *, restarts: int = 3, lockstep: bool = False
) -> AsyncIterator[tuple[RecordingFleet, Recovery, "asyncio.Task[None]"]]:
    fleet = RecordingFleet()
    await fleet.start()
    recovery = Recovery(
        fleet, heartbeat_limit_s=1.5, proxy_budget=RestartBudget(restarts, 60.0), lockstep=lockstep
    )
    running = asyncio.create_task(recovery.run())
    try:
        yield fleet, recovery, running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, RolloutLost):
            await running
        await fleet.scripted.server.stop()


async def within(awaitable: Any) -> Any:
    async with asyncio.timeout(20):
        return await awaitable


async def test_lost_workers_are_started_again_and_those_set_aside_are_ended() -> None:
    async with recovering() as (fleet, _, __):
        fleet.fails.add("b")
        fleet.scripted.losses.put_nowait({"restart": {"a": "gone"}, "set_aside": {"c": "frozen"}})
        fleet.scripted.losses.put_nowait({"restart": {"b": "gone"}})
        found = {await within(fleet.done.get()) for _ in range(3)}
        assert ("restarted", "a") in found
        assert ("stopped", "c") in found
        ((told, why),) = found - {("restarted", "a"), ("stopped", "c")}
        assert told == "restart_failed"
        assert "no such model" in why


async def test_with_no_worker_left_it_ends_and_says_what_to_do() -> None:
    async with recovering() as (fleet, recovery, running):
        fleet.scripted.losses.put_nowait({"set_aside": {"a": "gone"}, "left": False})
        with pytest.raises(RolloutLost, match=r"rollout\.worker_restarts.*resumes at its newest checkpoint"):
            await within(running)
        recovery.proxy_lost(fleet.proxy)
        with pytest.raises(RolloutLost):
            await within(recovery.proxy_up(running))


async def test_a_proxy_that_is_gone_or_silent_is_started_again_until_it_was_too_often() -> None:
    async with recovering(restarts=2) as (fleet, _, running):
        await fleet.scripted.server.stop()
        assert await within(fleet.done.get()) == ("restarted", "proxy")
        fleet.scripted.losses.put_nowait({"restart": {"a": "gone"}})
        assert await within(fleet.done.get()) == ("restarted", "a")
        fleet.scripted.beats.clear()
        assert await within(fleet.done.get()) == ("restarted", "proxy")
        fleet.scripted.beats.clear()
        with pytest.raises(RolloutLost, match=r"it is frozen.*rollout\.worker_restarts"):
            await within(running)


async def test_whoever_lost_the_connection_waits_for_the_next_proxy() -> None:
    async with recovering() as (fleet, recovery, running):
        before = fleet.proxy
        recovery.proxy_lost(before)
        await within(recovery.proxy_up(running))
        assert fleet.proxy is not before
        recovery.proxy_lost(before)  # late word of it
        await within(recovery.proxy_up(running))
        assert fleet.proxies == 2


async def test_in_lockstep_a_lost_proxy_ends_the_run() -> None:
    async with recovering(lockstep=True) as (fleet, _, running):
        await fleet.scripted.server.stop()
        with pytest.raises(RolloutLost, match="a round"):
            await within(running)
