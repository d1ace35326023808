"""The campaign's side of its pool hosts: where they report, and a launcher that starts services on them."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from infra.clock import now
from infra.launcher import Attendance, Role, healthy
from infra.pools.host import ALIVE_LIMIT_S, until_gone
from infra.processes import ServiceFailed
from infra.rpc import ConnectionLost, RpcClient, RpcConnection, RpcError, RpcServer


class HostLost(RuntimeError):
    """A pool's host ended while the run needed it. The message names its flow run."""


class HostConnection:
    """One host, as the campaign commands it."""

    def __init__(self, pool: str, about: Mapping[str, str], client: RpcClient):
        self.pool = pool
        self.about = dict(about)
        self.client = client
        self.dispatch_seconds: deque[float] = deque(maxlen=10_000)
        """Of each stage: the whole of its call, without the seconds inside of the service."""

    def lost(self) -> HostLost:
        return HostLost(
            f"the host of work pool {self.pool!r} is gone: look at its flow run "
            f"{self.about.get('flow_run_name', '')} ({self.about.get('flow_run_id', 'unknown')}) and its log"
        )

    async def call(self, method: str, payload: Any = None) -> Any:
        """Raises `HostLost` rather than `ConnectionLost`."""
        try:
            return await self.client.call(method, payload)
        except ConnectionLost as error:
            raise self.lost() from error


class Rendezvous:
    """Where hosts report. `hosts` has one for each expected pool once `complete` returns."""

    def __init__(self, pools: set[str], token: str):
        self.hosts: dict[str, HostConnection] = {}
        self._expected = pools
        self._token = token
        self._changed = asyncio.Event()

        async def alive(_: Any, __: RpcConnection) -> None:
            return None

        self._server = RpcServer({"register": self._register, "alive": alive}, token=token)

    async def start(self, address: str) -> str:
        return await self._server.start(address)

    async def complete(self) -> None:
        """Wait until a host of every pool has reported."""
        while self.missing:
            await self._changed.wait()
            self._changed.clear()

    @property
    def missing(self) -> set[str]:
        return self._expected - set(self.hosts)

    async def stop(self) -> None:
        """End every host, and stop listening."""
        await asyncio.gather(*(_end(host) for host in self.hosts.values()))
        await self._server.stop()

    async def _register(self, payload: Any, _: RpcConnection) -> None:
        pool = payload["pool"]
        if pool not in self._expected or pool in self.hosts:
            raise RpcError("refused", f"no host of pool {pool!r} is awaited")
        client = await RpcClient(payload["url"], token=self._token).connect()
        self.hosts[pool] = HostConnection(pool, payload, client)
        self._changed.set()


async def _end(host: HostConnection) -> None:
    with contextlib.suppress(RpcError, TimeoutError):
        await host.client.call("end", timeout_s=ALIVE_LIMIT_S)
    await host.client.close()


class HostedService:
    def __init__(self, host: HostConnection, name: str, ready: dict[str, Any], token: str | None):
        self.name = name
        self.ready = ready
        self._host = host
        self._token = token
        self._client: RpcClient | None = None
        self._watched: RpcClient | None = None
        self._connecting = asyncio.Lock()

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    async def call(self, method: str, payload: Any = None, *, stage: str | None = None) -> Any:
        if stage is not None:
            return await self._stage(stage, method, payload)
        async with self._connecting:
            if self._client is None:
                self._client = await RpcClient(self.url, token=self._token).connect()
        return await self._client.call(method, payload)

    async def _stage(self, title: str, method: str, payload: Any) -> Any:
        started = now()
        answer = await self._host.call(
            "stage", {"title": title, "service": self.name, "method": method, "payload": payload}
        )
        self._host.dispatch_seconds.append(now() - started - answer["seconds"])
        return answer["result"]

    async def ended(self) -> str:
        if self._watched is None and self.url.startswith("http"):
            self._watched = await RpcClient(self.url, token=self._token).connect()
        if self._watched is None:  # it speaks no RPC: known by its signs of life
            await asyncio.Event().wait()
        else:
            await self._watched.wait_closed()
        return f"the connection to it on the host of work pool {self._host.pool!r} closed"

    async def alive(self) -> None:
        await healthy(self.url)

    async def stop(self) -> None:
        for client in (self._client, self._watched):
            if client is not None:
                await client.close()
        with contextlib.suppress(HostLost):  # then the service has ended with its host
            await self._host.call("stop_service", {"name": self.name})


class PoolLauncher:
    """Starts services on pool hosts. `roles` maps every role to its pools.

    `environment` goes to every service, over the hosts' connections: what opens the run's stores.
    """

    runs_stages = True

    def __init__(
        self,
        hosts: Mapping[str, HostConnection],
        roles: Mapping[Role, tuple[str, ...]],
        environment: Mapping[str, str],
    ):
        self._hosts = hosts
        self._roles = roles
        self._environment = dict(environment)

    @property
    def hosts(self) -> list[HostConnection]:
        return list(self._hosts.values())

    def pools(self, role: Role) -> tuple[str, ...]:
        return self._roles[role]

    async def start(
        self,
        pool: str,
        name: str,
        module: str,
        settings: dict[str, Any],
        log: Path,
        *,
        environment: dict[str, str] | None = None,
        start_limit_s: float = 120.0,
    ) -> HostedService:
        host = self._hosts[pool]
        request = {
            "name": name,
            "module": module,
            "settings": settings,
            "log": str(log),
            "environment": {**self._environment, **(environment or {})},
            "start_limit_s": start_limit_s,
        }
        try:
            ready = await host.call("start_service", request)
        except RpcError as error:
            raise ServiceFailed(f"work pool {pool}: {error.message}") from error
        return HostedService(host, name, ready, settings.get("token"))

    @contextlib.asynccontextmanager
    async def attend(self, role: Role, step: int) -> AsyncIterator[Attendance]:
        title, attendance = f"{role} {step}", Attendance()
        hosts = [self._hosts[pool] for pool in self._roles[role]]
        stages = [asyncio.ensure_future(host.call("attend", {"title": title})) for host in hosts]
        try:
            yield attendance
            release = {"title": title, "summary": attendance.summary}
            await asyncio.gather(*(host.call("release", release) for host in hosts))
            await asyncio.gather(*stages)
        finally:
            for stage in stages:
                stage.cancel()
            await asyncio.gather(*stages, return_exceptions=True)

    async def first_lost(self) -> HostLost:
        """Wait until a host is gone, and return what to raise."""
        watches = {asyncio.ensure_future(until_gone(host.client)): host for host in self._hosts.values()}
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return watches[done.pop()].lost()
        finally:
            for watch in watches:
                watch.cancel()
