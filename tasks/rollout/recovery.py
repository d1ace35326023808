"""Starts lost inference workers and a lost proxy again, in their places."""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, Protocol

from infra.clock import now
from infra.launcher import Service
from infra.rpc import ConnectionLost, RpcClient, RpcError
from tasks.rollout.worker_life import RestartBudget

logger = logging.getLogger(__name__)

_BEATS = 4


class RolloutLost(RpcError):
    """Nothing generates any more, and nothing more is started again. The message says what to do."""

    def __init__(self, message: str):
        super().__init__("rollout_lost", message)


class Restartable(Protocol):
    """The fleet, as its recovery sees it."""

    token: str

    @property
    def proxy(self) -> Service: ...

    async def stop_engine(self, name: str) -> None:
        """End what is left of a worker that is set aside."""

    async def restart_engine(self, name: str) -> None:
        """End what is left of the worker, start it with the served version, and let the proxy take it in."""

    async def restart_proxy(self) -> None:
        """End what is left of the proxy and start it again at its address, with what it must know."""

    async def tell_proxy(self, method: str, payload: Any) -> Any: ...


class Recovery:
    """Runs until nothing can be recovered any more. `proxy_is_back` wakes whoever waits for the proxy."""

    def __init__(
        self, fleet: Restartable, *, heartbeat_limit_s: float, proxy_budget: RestartBudget, lockstep: bool
    ):
        self._fleet = fleet
        self._limit_s = heartbeat_limit_s
        self._budget = proxy_budget
        self._lockstep = lockstep
        self.restarting: set[str] = set()
        """Workers that are being started again."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._proxy_up = asyncio.Event()
        self._proxy_up.set()
        self._proxy_doubted = asyncio.Event()

    async def run(self) -> None:
        """Raises `RolloutLost`, or whatever the start of another proxy raised."""
        try:
            while True:
                why = await self._until_proxy_lost()
                self._proxy_up.clear()
                if self._lockstep:
                    raise RolloutLost(
                        f"the LLM proxy is lost ({why}), and with it which turns of a round were under way: "
                        "start the run again, it resumes at its newest checkpoint"
                    )
                if not self._budget.spend(now()):
                    raise RolloutLost(
                        f"the LLM proxy was lost again ({why}), more often than rollout.worker_restarts "
                        "allows: look at its log, then start the run again, it resumes at its newest "
                        "checkpoint"
                    )
                logger.warning("the LLM proxy is lost and is started again: %s", why)
                await self._fleet.restart_proxy()
                self._proxy_doubted.clear()
                self._proxy_up.set()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def proxy_up(self, running: Awaitable[None]) -> None:
        """Wait until the proxy serves again. Raises what ended `running`, the task of `run`."""
        up = asyncio.ensure_future(self._proxy_up.wait())
        try:
            await asyncio.wait({up, asyncio.ensure_future(running)}, return_when=asyncio.FIRST_COMPLETED)
            if not up.done():
                await running
        finally:
            up.cancel()

    def proxy_lost(self, proxy: Service) -> None:
        """The connection to this proxy broke. If it is still the present one, it is started again."""
        if proxy is self._fleet.proxy:
            self._proxy_up.clear()
            self._proxy_doubted.set()

    async def _until_proxy_lost(self) -> str:
        """Look after the workers as long as the proxy answers; why it no longer does."""
        client = RpcClient(self._fleet.proxy.url, token=self._fleet.token)
        doubted = asyncio.ensure_future(self._proxy_doubted.wait())

        def call(method: str) -> asyncio.Future[Any]:
            made = asyncio.ensure_future(client.call(method))
            made.add_done_callback(_retrieve)
            return made

        try:
            await client.connect(timeout_s=self._limit_s)
            poll = call("lost_workers")
            while True:
                await asyncio.wait(
                    {poll, doubted}, timeout=self._limit_s / _BEATS, return_when=asyncio.FIRST_COMPLETED
                )
                if doubted.done():
                    return "a connection to it broke"
                if poll.done():
                    self._restart(await poll)
                    poll = call("lost_workers")
                beat = call("ping")
                await asyncio.wait({beat}, timeout=self._limit_s)
                if not beat.done():
                    return f"it is frozen: no answer for rollout.heartbeat_limit_s ({self._limit_s} s)"
                await beat
        except ConnectionLost as error:
            return str(error)
        finally:
            doubted.cancel()
            client.drop()
            await client.close()

    def _restart(self, lost: dict[str, Any]) -> None:
        if not lost["left"]:
            raise RolloutLost(
                "no inference worker is left, each was lost more often than rollout.worker_restarts allows: "
                "look at the logs of the engines, then start the run again, it resumes at its newest "
                "checkpoint"
            )
        for name, why in lost["set_aside"].items():
            logger.error(
                "inference worker %s is set aside, lost more often than rollout.worker_restarts allows; the "
                "run goes on with the others: %s",
                name,
                why,
            )
            self._begin(self._fleet.stop_engine(name))
        for name, why in lost["restart"].items():
            logger.warning("inference worker %s is started again: %s", name, why)
            self._begin(self._restart_worker(name))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restart_worker(self, name: str) -> None:
        self.restarting.add(name)
        try:
            await self._fleet.restart_engine(name)
        except Exception as error:  # a launcher's or a store's: whatever it is, the worker is not there
            logger.warning("inference worker %s could not be started again: %s", name, error)
            why = f"it could not be started again: {type(error).__name__}: {error}"
            await self._fleet.tell_proxy("restart_failed", {"name": name, "why": why})
        finally:
            self.restarting.discard(name)


def _retrieve(call: asyncio.Future[Any]) -> None:
    if not call.cancelled():
        call.exception()
