"""Where a run's services start: on this machine, or on the hosts of work pools. One protocol, two forms.

The control plane names a pool, starts services on it and calls them. What is called as a *stage* is work that
a person wants to see: on a pool host it becomes a task run of the host's flow run (`infra.pools`); on one
machine it is a plain call.
"""

import asyncio
import contextlib
import urllib.parse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal, Protocol

import aiohttp

from infra.processes import ServiceProcess
from infra.rpc import RpcClient

Role = Literal["rollout", "prefill", "train", "environment", "reward"]
LOCAL_POOL = "default"


class Service(Protocol):
    """A service that runs, wherever it does."""

    @property
    def name(self) -> str: ...

    @property
    def ready(self) -> dict[str, Any]:
        """What the service said when it began to serve."""

    @property
    def url(self) -> str: ...

    async def call(self, method: str, payload: Any = None, *, stage: str | None = None) -> Any:
        """Call one of the service's methods, as a task run of the name `stage` where that can be.

        Raises `RpcError`; on a pool, `infra.pools.launcher.HostLost` when the pool's host is gone.
        """

    async def ended(self) -> str:
        """Return once the service has ended by itself or was lost, and say why."""

    async def alive(self) -> None:
        """Return once the service's event loop has answered. Raises when it cannot be reached."""

    async def stop(self) -> None: ...


class Attendance:
    """What a stage did, to be filled in before it ends: shown with its task run."""

    def __init__(self) -> None:
        self.summary: dict[str, Any] = {}


class Launcher(Protocol):
    @property
    def runs_stages(self) -> bool:
        """Whether a stage gets its own task run on a host, so that the caller must not make one."""

    def pools(self, role: Role) -> tuple[str, ...]:
        """The pools of a role, never none."""

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
    ) -> Service:
        """Start `python -m module` on the pool, as `ServiceProcess.start`. Raises `ServiceFailed`.

        `settings["token"]`, where there is one, is what the service's callers must present.
        """

    def attend(self, role: Role, step: int) -> contextlib.AbstractAsyncContextManager[Attendance]:
        """While it is open, the role's pools show that its stage of this step is under way."""


async def healthy(url: str) -> None:
    """Return once the service at `url` has answered; `tcp` ones are only connected to."""
    if url.startswith("http"):
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as answer:
            answer.raise_for_status()
        return
    parts = urllib.parse.urlsplit(url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.close()


class LocalService:
    def __init__(self, process: ServiceProcess, token: str | None):
        self._process = process
        self._token = token
        self._client: RpcClient | None = None
        self._connecting = asyncio.Lock()

    @property
    def name(self) -> str:
        return self._process.name

    @property
    def ready(self) -> dict[str, Any]:
        return self._process.ready

    @property
    def url(self) -> str:
        return self._process.url

    @property
    def process(self) -> ServiceProcess:
        return self._process

    async def call(self, method: str, payload: Any = None, *, stage: str | None = None) -> Any:
        async with self._connecting:
            if self._client is None:
                self._client = await RpcClient(self.url, token=self._token).connect()
        return await self._client.call(method, payload)

    async def ended(self) -> str:
        status = await self._process.wait()
        return f"its process {self._process.process.pid} ended with status {status}"

    async def alive(self) -> None:
        await healthy(self.url)

    async def stop(self) -> None:
        await asyncio.gather(self._process.stop(), *([] if self._client is None else [self._client.close()]))


class LocalLauncher:
    """Everything on this machine, as children of this process. `rollout` names pools that engines are spread
    over as if each were hardware of its own."""

    runs_stages = False

    def __init__(self, rollout: tuple[str, ...] = ()):
        self._rollout = rollout or (LOCAL_POOL,)

    def pools(self, role: Role) -> tuple[str, ...]:
        return self._rollout if role in ("rollout", "prefill") else (LOCAL_POOL,)

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
    ) -> LocalService:
        process = await ServiceProcess.start(
            name, module, settings, log, environment=environment, start_limit_s=start_limit_s
        )
        return LocalService(process, settings.get("token"))

    @contextlib.asynccontextmanager
    async def attend(self, role: Role, step: int) -> AsyncIterator[Attendance]:
        yield Attendance()
