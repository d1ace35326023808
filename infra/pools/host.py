"""A pool host: the long-lived process on a work pool's machine that holds a campaign's services there.

It knows one campaign, finds it by a ticket, and ends with it: its services are children of this process, and
it ends when the connection to the campaign does. It knows no Prefect: how a stage becomes a task run is given
to it (flows/pool_host.py).
"""

import asyncio
import logging
import urllib.parse
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.clock import now
from infra.config import Config
from infra.launcher import LocalLauncher, LocalService
from infra.processes import ServiceFailed
from infra.rpc import ConnectionLost, RpcClient, RpcConnection, RpcError, RpcServer

logger = logging.getLogger(__name__)

ALIVE_EVERY_S = 10.0
ALIVE_LIMIT_S = 60.0
"""A peer that does not answer for this long is taken for gone: its machine may have vanished."""
SERVICE_PACKAGES = ("infra.", "tasks.")

StageBody = Callable[[], Awaitable[Any]]
RunStage = Callable[[str, StageBody], Coroutine[Any, Any, Any]]
"""Performs the body under a title such as `train 12`, visibly, and returns what it returns."""


class Ticket(Config):
    """How a host finds its campaign. Secret: whoever holds it commands the hosts of the run."""

    url: str
    """Of the campaign's rendezvous."""
    token: str
    pool: str


@dataclass(slots=True)
class _Attended:
    released: asyncio.Event
    summary: dict[str, Any]


class CampaignGone(RuntimeError):
    """The campaign that this host served ended without saying so."""


class PoolHost:
    """`packages` are the beginnings of the names of modules that it starts."""

    def __init__(self, ticket: Ticket, run_stage: RunStage, packages: tuple[str, ...] = SERVICE_PACKAGES):
        self._ticket = ticket
        self._packages = packages
        self._run_stage = run_stage
        self._services: dict[str, LocalService] = {}
        self._attended: dict[str, _Attended] = {}
        self._address = "127.0.0.1"
        self._ended = asyncio.Event()

    async def serve(self, about: dict[str, str]) -> None:
        """Report to the campaign and serve it until it ends. `about` is told to it: where this host runs.

        Raises `CampaignGone` when it ended without a word. Every service has been stopped by then.
        """
        try:
            campaign = await RpcClient(self._ticket.url, token=self._ticket.token).connect()
        except ConnectionLost as error:
            raise CampaignGone(f"the campaign at {self._ticket.url} is not there: {error}") from error
        handlers = (self.start_service, self.stop_service, self.stage, self.attend, self.release, self.end)
        server = RpcServer(
            {**{handler.__name__: handler for handler in handlers}, "alive": _alive}, token=self._ticket.token
        )
        try:
            # Where the campaign is reached from: loopback for a campaign on this machine.
            self._address = campaign.local_address
            url = await server.start(self._address)
            await campaign.call("register", {**about, "pool": self._ticket.pool, "url": url}, ALIVE_LIMIT_S)
            await self._until_the_end(campaign)
        finally:
            await server.stop()
            await asyncio.gather(*(service.stop() for service in self._services.values()))
            await campaign.close()

    async def _until_the_end(self, campaign: RpcClient) -> None:
        ended = asyncio.ensure_future(self._ended.wait())
        gone = asyncio.ensure_future(until_gone(campaign))
        try:
            await asyncio.wait({ended, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            gone.cancel()
        if not self._ended.is_set():
            raise CampaignGone(f"the campaign at {self._ticket.url} is gone; its services here were stopped")

    async def start_service(self, payload: Any, _: RpcConnection) -> dict[str, Any]:
        """As `LocalLauncher.start`; the service binds the address at which the campaign reaches this host."""
        name, module = payload["name"], payload["module"]
        if not module.startswith(self._packages):
            raise RpcError("refused", f"{module} is no service of this project")
        if name in self._services:
            raise RpcError("refused", f"{name} runs here already")
        try:
            service = await LocalLauncher().start(
                self._ticket.pool,
                name,
                module,
                {**payload["settings"], "host": self._address},
                Path(payload["log"]),
                environment=payload["environment"],
                start_limit_s=payload["start_limit_s"],
            )
        except ServiceFailed as error:
            raise RpcError("service_failed", str(error)) from error
        self._services[name] = service
        return service.ready

    async def stop_service(self, payload: Any, _: RpcConnection) -> None:
        service = self._services.pop(payload["name"], None)
        if service is not None:
            await service.stop()

    async def stage(self, payload: Any, _: RpcConnection) -> dict[str, Any]:
        """Call a service's method, as a stage. Returns its result, and the seconds inside of it."""
        service = self._services.get(payload["service"])
        if service is None:
            raise RpcError("refused", f"{payload['service']} does not run here")
        seconds = 0.0

        async def body() -> Any:
            nonlocal seconds
            started = now()
            try:
                return await service.call(payload["method"], payload["payload"])
            finally:
                seconds = now() - started

        result = await self._run_stage(payload["title"], body)
        return {"result": result, "seconds": seconds}

    async def attend(self, payload: Any, _: RpcConnection) -> None:
        """A stage whose work goes on elsewhere on this pool: it lasts until `release`."""
        title = payload["title"]
        attended = self._attended[title] = _Attended(asyncio.Event(), {})

        async def body() -> dict[str, Any]:
            await attended.released.wait()
            return attended.summary

        try:
            await self._run_stage(title, body)
        finally:
            self._attended.pop(title, None)

    async def release(self, payload: Any, _: RpcConnection) -> None:
        attended = self._attended.get(payload["title"])
        if attended is not None:
            attended.summary.update(payload["summary"])
            attended.released.set()

    async def end(self, _: Any, __: RpcConnection) -> None:
        """The campaign needs this host no longer."""
        self._ended.set()


async def _alive(_: Any, __: RpcConnection) -> None:
    return None


async def until_gone(peer: RpcClient) -> None:
    """Return once the peer's connection is closed, or the peer no longer answers."""
    while True:
        try:
            async with asyncio.timeout(ALIVE_EVERY_S):
                await peer.wait_closed()
            return
        except TimeoutError:
            pass
        try:
            await peer.call("alive", timeout_s=ALIVE_LIMIT_S)
        except (TimeoutError, RpcError) as error:
            logger.warning("%s does not answer: %s", peer.url, error)
            return


def reachable_address(other: str) -> str:
    """The address of this machine on the way to another one, given by URL: loopback for this machine."""
    import socket

    parts = urllib.parse.urlsplit(other)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        return str(probe.getsockname()[0])
