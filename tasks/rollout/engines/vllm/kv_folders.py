"""The files that vLLM's connector (`kv_connector.py`) writes and reads: kept, counted, read and removed."""

import asyncio
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import xxhash
from numpy.typing import NDArray

from infra.rpc import RpcError
from tasks.rollout.engines.base import HeldKv

LAYOUT = "vllm-blocks-1"
PREFIX = "tutti-kv-"
"""Of the folders' names; the process id of the engine service follows."""
_POLL_S = 0.005
_MEMORY = Path("/dev/shm")


class KvFolders:
    """Folders with KV, in memory where the system has a file system there; the directory ends with it."""

    def __init__(self, most: int):
        """Holds KV of up to `most` prefills; the one held longest goes first."""
        self._most = most
        memory = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
        _remove_orphans(memory)
        self._root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=memory))
        self._held: OrderedDict[str, tuple[str, HeldKv, NDArray[np.int32]]] = OrderedDict()
        self._made = 0
        self.cleared = 0
        self.exported_tokens = 0

    def new(self) -> Path:
        """A folder that does not exist yet."""
        self._made += 1
        return self._root / f"{self._made:08d}"

    def hold(self, session: str, folder: Path, tokens: NDArray[np.int32], version: int) -> HeldKv:
        """Keep what vLLM wrote to `folder`: the KV of these tokens under this policy version."""
        held = HeldKv(folder.name, len(tokens), version)
        self.forget(session)
        self._held[held.key] = session, held, tokens
        while len(self._held) > self._most:
            self._drop(next(iter(self._held)))
        return held

    async def written(self, folder: Path, ranks: int) -> None:
        """Wait until every tensor-parallel rank has written its file: vLLM answers when the first has."""
        while len(rank_files(folder)) < ranks:  # noqa: ASYNC110, nobody tells us
            await asyncio.sleep(_POLL_S)

    def forget(self, session: str) -> None:
        for key in [key for key, (of, *_) in self._held.items() if of == session]:
            self._drop(key)

    def clear(self) -> None:
        """The weights change: whatever KV there is, held or on its way into vLLM, is of the old ones."""
        self.cleared += 1
        self._held.clear()
        for folder in self._root.iterdir():
            remove(folder)

    def export(self, key: str, start: int, count: int) -> dict[str, Any]:
        """Bytes `start : start + count` of the files one after the other. Blocks on reading.

        Raises `RpcError` of code `kv_gone`.
        """
        if key not in self._held:
            raise RpcError("kv_gone", f"no KV is held under {key!r}")
        _, held, tokens = self._held[key]
        files = rank_files(self._root / key)
        try:
            sizes = [file.stat().st_size for file in files]
            content = _read(files, sizes, start, count)
        except FileNotFoundError as error:
            raise RpcError("kv_gone", f"KV under {key!r} was just forgotten") from error
        if start == 0:
            self.exported_tokens += held.tokens
        return {
            "layout": LAYOUT,
            "version": held.version,
            "tokens": tokens.astype("<i4").tobytes(),
            "sizes": sizes,
            "content": content,
            "checksum": xxhash.xxh3_128_hexdigest(content),
        }

    def close(self) -> None:
        remove(self._root)

    def _drop(self, key: str) -> None:
        del self._held[key]
        remove(self._root / key)


def _remove_orphans(memory: Path) -> None:
    """Folders of this user's services that were killed."""
    for folder in memory.glob(f"{PREFIX}*"):
        process = folder.name.removeprefix(PREFIX).partition("-")[0]
        if (
            process.isdecimal()
            and not psutil.pid_exists(int(process))
            and folder.stat().st_uid == os.getuid()
        ):
            remove(folder)


def remove(folder: Path) -> None:
    """Also where it is not there."""
    shutil.rmtree(folder, ignore_errors=True)


def rank_files(folder: Path) -> list[Path]:
    files = folder.glob("rank-*.safetensors")
    return sorted(files, key=lambda file: int(file.stem.removeprefix("rank-")))


def _read(files: Sequence[Path], sizes: Sequence[int], start: int, count: int) -> bytes:
    parts = []
    for file, size in zip(files, sizes, strict=True):
        if start < size and count > 0:
            with file.open("rb") as content:
                content.seek(start)
                parts.append(content.read(count))
            count -= len(parts[-1])
        start = max(0, start - size)
    return b"".join(parts)
