"""KV between vLLM engines: the engine's side of holding it for others and of fetching it from another."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from infra.rpc import RpcError
from tasks.rollout.config import VllmEngineConfig
from tasks.rollout.engines.base import GenerateRequest, HeldKv, KvSource
from tasks.rollout.engines.kv_blocks import KvRejected
from tasks.rollout.engines.kv_imports import BLOCK_BYTES, KvConnections, KvImports, log_rejected
from tasks.rollout.engines.vllm.kv_folders import LAYOUT, KvFolders, remove
from tasks.trajectory import StopReason


@dataclass(frozen=True, slots=True)
class FetchedKv:
    """Files of another engine, for this one's vLLM to load."""

    folder: Path
    tokens: int
    version: int

    @property
    def parameters(self) -> dict[str, Any]:
        return {"load": str(self.folder), "tokens": self.tokens}


class KvHandover:
    """Files in folders of this engine, and connections to others. Without `shares` it has none: nothing is
    held, and everything is computed here."""

    def __init__(self, settings: VllmEngineConfig, *, shares: bool):
        self._ranks = settings.tensor_parallel
        self._limit_s = settings.kv_limit_s
        self._most = settings.max_running
        self._shares = shares
        self._folders: KvFolders | None = None
        self._connections = KvConnections(settings.kv_limit_s)
        self._imports = KvImports()

    def start(self) -> None:
        if self._shares:
            self._folders = KvFolders(self._most)

    async def stop(self) -> None:
        """Turns whose KV is on the way end as cancelled."""
        self._imports.abort_all()
        await self._connections.close()

    def remove_files(self) -> None:
        """Once vLLM has ended."""
        if self._folders is not None:
            self._folders.close()
            self._folders = None

    @property
    def fetching(self) -> int:
        """Turns whose KV is on the way."""
        return self._imports.running

    @property
    def exported_tokens(self) -> int:
        return self._folders.exported_tokens if self._folders is not None else 0

    def is_fetching(self, session: str) -> bool:
        return self._imports.has(session)

    def abort(self, sessions: Sequence[str], reason: StopReason) -> None:
        self._imports.abort(sessions, reason)

    def forget(self, session: str) -> None:
        if self._folders is not None:
            self._folders.forget(session)

    def clear(self) -> None:
        """The weights change: whatever KV there is, held or on its way into vLLM, is of the old ones."""
        if self._folders is not None:
            self._folders.clear()

    @contextmanager
    def room_to_save(self) -> Iterator[Path]:
        """A folder for vLLM to write to, which is removed where what follows fails. Raises `RpcError`."""
        if self._folders is None:
            raise RpcError("invalid_request", "this vLLM engine was not started to share KV: set its role")
        folder = self._folders.new()
        try:
            yield folder
        except BaseException:
            remove(folder)
            raise

    async def hold(self, session: str, folder: Path, tokens: NDArray[np.int32], version: int) -> HeldKv:
        """Keep what vLLM wrote to the folder. Raises TimeoutError where a rank does not write its part."""
        assert self._folders is not None
        if len(tokens):
            async with asyncio.timeout(self._limit_s):
                await self._folders.written(folder, self._ranks)
        return self._folders.hold(session, folder, tokens, version)

    def export(self, key: str, start: int, count: int) -> dict[str, Any]:
        """See `KvFolders.export`. Blocks."""
        if self._folders is None:
            raise RpcError("kv_gone", "this vLLM engine holds no KV for others")
        return self._folders.export(key, start, count)

    async def fetch(self, request: GenerateRequest, served: Callable[[], int | None]) -> FetchedKv | None:
        """KV that the request's source holds, of the version that `served` says; it says None while that
        changes. None where there is nothing to use. Raises `ImportAborted`."""
        if request.kv is None or self._folders is None:
            return None
        pull = self._pull(self._folders, request.kv, request.tokens, served)
        return await self._imports.fetch(request.session, pull)

    async def _pull(
        self,
        folders: KvFolders,
        source: KvSource,
        context: NDArray[np.int32],
        served: Callable[[], int | None],
    ) -> FetchedKv | None:
        folder, cleared = folders.new(), folders.cleared
        try:
            fetched = await _fetch_files(self._connections, source, folder, context, self._ranks)
            if fetched.version != served():
                raise KvRejected(f"it is of policy version {fetched.version}, not {served()}")
            if folders.cleared != cleared:
                raise KvRejected("the weights changed while it was fetched")
        except (RpcError, TimeoutError, KvRejected) as error:
            log_rejected(source, "from the first token on", error)
            remove(folder)
            return None
        except BaseException:
            remove(folder)
            raise
        return fetched


async def _fetch_files(
    connections: KvConnections, source: KvSource, folder: Path, context: NDArray[np.int32], ranks: int
) -> FetchedKv:
    """Copy the source's files to `folder`. `ranks` is this engine's tensor-parallel size.

    Raises `RpcError`, TimeoutError, or `KvRejected` where they are not of this context or not whole.
    """
    parts = bytearray()
    first: Mapping[str, Any] | None = None
    while first is None or len(parts) < sum(first["sizes"]):
        part = await connections.export(source, len(parts), BLOCK_BYTES)
        if first is None:
            first = part
            _require_of(part, context, ranks)
        if part.get("sizes") != first["sizes"] or part["version"] != first["version"]:
            raise KvRejected("it changed while it was fetched")
        if not part["content"] or xxhash.xxh3_128_hexdigest(part["content"]) != part["checksum"]:
            raise KvRejected("its content does not fit its checksum")
        parts += part["content"]
    await asyncio.to_thread(_write, folder, parts, first["sizes"])
    return FetchedKv(folder, len(first["tokens"]) // 4, first["version"])


def _require_of(part: Mapping[str, Any], context: NDArray[np.int32], ranks: int) -> None:
    if part.get("layout") != LAYOUT:
        raise KvRejected(f"its layout is {part.get('layout')!r}, not {LAYOUT!r}")
    if len(part["sizes"]) != ranks:
        raise KvRejected(f"it is of {len(part['sizes'])} tensor-parallel ranks, not {ranks}")
    tokens = np.frombuffer(part["tokens"], "<i4")
    if not np.array_equal(tokens, context[: len(tokens)]):
        raise KvRejected("it is of another context")


def _write(folder: Path, content: bytearray, sizes: Sequence[int]) -> None:
    folder.mkdir(parents=True)
    start = 0
    for rank, size in enumerate(sizes):
        (folder / f"rank-{rank}.safetensors").write_bytes(content[start : start + size])
        start += size
