"""Fetching KV from the engine that holds it, straight over its RPC, for requests yet to start here."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from infra.rpc import RpcClient, RpcError
from tasks.rollout.engines.base import KvSource
from tasks.rollout.engines.kv_blocks import KvBlock, KvRejected, KvShape, unpack_block
from tasks.trajectory import StopReason

logger = logging.getLogger(__name__)

Fetched = TypeVar("Fetched")

BLOCK_BYTES = 4 * 2**20
"""KV fetched in one call: a frame that large occupies both engines' event loops for a few milliseconds."""


class ImportAborted(Exception):
    """The request was aborted while its KV was on the way."""

    def __init__(self, reason: StopReason):
        super().__init__(reason.value)
        self.reason = reason


class KvConnections:
    """A connection to each engine that KV was fetched from; opened when needed, and again when lost."""

    def __init__(self, limit_s: float):
        """A source that does not answer a call in `limit_s` raises TimeoutError."""
        self._limit_s = limit_s
        self._clients: dict[str, RpcClient] = {}
        self._opening: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def export(self, source: KvSource, start: int, count: int) -> dict[str, Any]:
        """One call of the source's `export_kv`. Raises `RpcError` or TimeoutError."""
        client = await self._client(source)
        part: dict[str, Any] = await client.call(
            "export_kv", {"key": source.key, "start": start, "count": count}, self._limit_s
        )
        return part

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    async def _client(self, source: KvSource) -> RpcClient:
        async with self._opening[source.url]:
            client = self._clients.get(source.url)
            if client is None or not client.connected:
                if client is not None:
                    del self._clients[source.url]
                    await client.close()
                client = await RpcClient(source.url, token=source.token).connect(timeout_s=self._limit_s)
                self._clients[source.url] = client
            return client


@dataclass(eq=False, slots=True)
class _Import:
    aborted: StopReason | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class KvImports:
    """What is on its way to one engine, by session."""

    def __init__(self) -> None:
        self._under_way: dict[str, _Import] = {}

    @property
    def running(self) -> int:
        return len(self._under_way)

    def has(self, session: str) -> bool:
        return session in self._under_way

    async def fetch(self, session: str, pull: Coroutine[Any, Any, Fetched]) -> Fetched:
        """What `pull` returns. Raises `ImportAborted` when the session is aborted meanwhile."""
        this = self._under_way[session] = _Import()
        pulling = asyncio.create_task(pull)
        abort = asyncio.create_task(this.ended.wait())
        try:
            await asyncio.wait([pulling, abort], return_when=asyncio.FIRST_COMPLETED)
            if this.aborted is not None:
                raise ImportAborted(this.aborted)
            return await pulling
        finally:
            del self._under_way[session]
            abort.cancel()
            pulling.cancel()

    def abort(self, sessions: Iterable[str], reason: StopReason) -> None:
        for session in sessions:
            this = self._under_way.get(session)
            if this is not None:
                this.aborted = reason
                this.ended.set()

    def abort_all(self) -> None:
        self.abort(list(self._under_way), StopReason.CANCELLED)


async def pull_blocks(
    connections: KvConnections,
    shape: KvShape,
    source: KvSource,
    lacking: range,
    check: Callable[[KvBlock, int], None],
) -> list[KvBlock]:
    """KV of the positions in `lacking`, in blocks that follow each other from its start on.

    `check` raises `KvRejected` on a block that must not be used at the position it is given. Where the source
    has less, is gone, or gives what cannot be used, the blocks end: the caller computes the rest.
    """
    blocks: list[KvBlock] = []
    start, most = lacking.start, max(1, BLOCK_BYTES // shape.bytes_per_token)
    while start < lacking.stop:
        try:
            answer = await connections.export(source, start, min(most, lacking.stop - start))
            block = unpack_block(answer, shape)
            check(block, start)
        except (RpcError, TimeoutError, KvRejected) as error:
            log_rejected(source, f"from token {start} on", error)
            break
        blocks.append(block)
        start = block.stop
    return blocks


def log_rejected(source: KvSource, what: str, error: Exception) -> None:
    logger.warning("KV of %s, %s, is computed here: %s: %s", source.key, what, type(error).__name__, error)
