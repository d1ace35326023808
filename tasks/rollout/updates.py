"""New weights for all workers while turns are held, and workers that join while that goes on.

No worker gets a turn unless it holds the served version: an update and a worker's joining exclude each other,
and a worker that does not take a version is lost.
"""

import asyncio
import logging
from typing import Any

from infra.rpc import ConnectionLost, RpcClient, RpcError
from tasks.rollout.workers import EngineAddress, Workers

logger = logging.getLogger(__name__)


class Updates:
    """`version` is served; `suspended` while an update is under way, from before the first command to it."""

    def __init__(
        self, workers: Workers, command_limit_s: float, version: int = 0, *, suspended: bool = False
    ):
        self.version = version
        self._workers = workers
        self._limit_s = command_limit_s
        self._changing = asyncio.Lock()
        self._open = asyncio.Event()
        if not suspended:
            self._open.set()

    @property
    def suspended(self) -> bool:
        return not self._open.is_set()

    async def opened(self) -> None:
        """Wait until turns may be sent to workers."""
        await self._open.wait()

    async def suspend(self) -> None:
        """Hold new turns back and freeze the running ones; nothing is lost."""
        self._open.clear()
        async with self._changing:
            await self._everywhere("suspend")

    async def prefetch(self, version: int) -> None:
        """Every worker pulls the published version beside generation. One that cannot will say so again when
        it is to serve it."""
        answers = await self._workers.command_all("prefetch", {"version": version})
        for name, answer in answers.items():
            if isinstance(answer, RpcError):
                logger.warning("%s did not pull version %d ahead: %s", name, version, answer)

    async def load_weights(self, version: int) -> None:
        """Every worker takes the published version; returns once all that are left have acknowledged it.

        One that does not is lost; when it comes back it has the version before it gets a turn. Raises
        `RpcError` of code `update_failed` when workers refused the version and none took it, or none is left.
        """
        async with self._changing:
            answers = await self._workers.command_all("load_weights", {"version": version})
            refused = {name: answer for name, answer in answers.items() if isinstance(answer, RpcError)}
            for name, error in refused.items():
                self._workers.lost(name, f"it did not take version {version}: {error}")
            if len(refused) == len(answers) and (refused or not self._workers.awaited):
                problems = {name: str(error) for name, error in refused.items()}
                raise RpcError("update_failed", f"no worker took version {version}: {problems}")
            self.version = version

    async def resume(self) -> None:
        async with self._changing:
            await self._everywhere("resume")
            self._open.set()

    async def recompute(self) -> int:
        """Wait until the requests that were frozen at the last update have rebuilt their KV."""
        answers = await self._workers.command_all("recompute")
        return sum(answer for answer in answers.values() if isinstance(answer, int))

    async def join(self, address: EngineAddress) -> None:
        """Give turns to a worker, once it holds the served version, frozen while the others are.

        Raises `RpcError`, or TimeoutError where it does not do as told; it gets no turns then.
        """
        client = await self._workers.connect(address)
        try:
            async with asyncio.timeout(self._limit_s):
                await self._join(address, client)
        except BaseException as error:
            client.drop()
            await client.close()
            if isinstance(error, ConnectionLost):
                raise RpcError("lost", f"{address.name} was lost while it joined: {error.message}") from error
            raise

    async def _join(self, address: EngineAddress, client: RpcClient) -> None:
        held = None
        while True:
            version = self.version
            await client.call("suspend")
            if held is None:
                held = (await client.call("stats"))["version"]
            if held != version:
                try:
                    await client.call("load_weights", {"version": version})
                except RpcError:
                    if self.version == version:
                        raise
                    continue  # it may be gone from the store since a newer one is served
                held = version
            async with self._changing:
                if self.version != version:
                    continue
                if not self.suspended:
                    await client.call("resume")
                self._workers.admit(address, client)
                return

    async def _everywhere(self, command: str, payload: Any = None) -> None:
        for name, answer in (await self._workers.command_all(command, payload)).items():
            if isinstance(answer, RpcError):
                self._workers.lost(name, f"{command}: {answer}")
