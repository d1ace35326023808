"""The fsspec file system behind a remote or in-memory object store."""

import contextlib
import inspect
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fsspec.asyn import AsyncFileSystem

from infra.local_files import Data, Found, UnsupportedStore

_CONFLICT_TRIES = 8


class UnreachableStore(ConnectionError):
    """The server of a store does not answer."""


class RemoteFiles:
    """An fsspec file system whose writes are whole by nature: object stores, and memory."""

    # fsspec's memory file system is a dictionary that it reads and writes in several steps; as one process
    # holds it, one lock makes each operation atomic.
    _memory_lock = threading.RLock()

    def __init__(self, filesystem: Any, root: str):
        self._filesystem = filesystem
        self._root = root
        self._in_memory = "memory" in _protocols(filesystem)
        self._can_create = self._in_memory or _creates_conditionally(filesystem)

    @property
    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        with self._memory_lock if self._in_memory else contextlib.nullcontext():
            try:
                yield
            except Exception as error:
                # botocore's own errors of the connection come through s3fs as they are, and are no OSError.
                if not isinstance(error, OSError) and _of_the_connection(error):
                    raise UnreachableStore(f"{self._root}: {type(error).__name__}: {error}") from error
                raise

    def sub(self, prefix: str) -> "RemoteFiles":
        return RemoteFiles(self._filesystem, f"{self._root}/{prefix}")

    def write(self, key: str, data: Data, durable: bool) -> None:
        with self._guard:
            self._filesystem.pipe_file(f"{self._root}/{key}", _as_bytes(data))

    def create(self, key: str, data: Data, durable: bool) -> bool:
        if not self._can_create:
            raise UnsupportedStore(
                f"the fsspec file system {type(self._filesystem).__name__} cannot create an object "
                "conditionally: point this store (stores.samples) at a local directory, S3, or another store "
                "whose fsspec package implements pipe_file(mode='create')"
            )
        path = f"{self._root}/{key}"
        for _ in range(_CONFLICT_TRIES):
            try:
                with self._guard:
                    return self._create(path, _as_bytes(data))
            except OSError as error:
                if _error_code(error) != "ConditionalRequestConflict":
                    raise
        # Every try met another writer of the same key; S3 says so while that write is under way.
        raise TimeoutError(f"concurrent writers of {path} kept each other from creating it")

    def _create(self, path: str, data: bytes) -> bool:
        try:
            self._filesystem.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            if _error_code(error) in ("PreconditionFailed", "412"):
                return False
            raise
        return True

    def read(self, key: str) -> bytes:
        with self._guard:
            data: bytes = self._filesystem.cat_file(f"{self._root}/{key}")
        return data

    def read_many(self, keys: Sequence[str]) -> Found:
        if not keys:
            return []
        paths = [f"{self._root}/{key}" for key in keys]
        with self._guard:
            found = self._filesystem.cat(paths, on_error="return")
        return [found[path] for path in paths]

    def exists(self, key: str) -> bool:
        # Not fsspec's `isfile`, to which a store that refuses to answer has no file.
        try:
            with self._guard:
                return bool(self._filesystem.info(f"{self._root}/{key}")["type"] == "file")
        except FileNotFoundError:
            return False

    def list(self, prefix: str) -> Iterable[str]:
        base = f"{self._root}/{prefix}" if prefix else self._root
        with self._guard:
            found = self._filesystem.find(base)
        return [path.removeprefix(f"{self._root}/") for path in found if path.startswith(f"{base}/")]

    def folders(self, prefix: str) -> Iterable[str]:
        base = f"{self._root}/{prefix}" if prefix else self._root
        try:
            with self._guard:
                entries = self._filesystem.ls(base, detail=True)
        except FileNotFoundError:
            return []
        return [
            entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"
        ]

    def delete(self, key: str) -> None:
        path = f"{self._root}/{key}"
        with self._guard:
            doomed = [found for found in self._filesystem.find(path) if found.startswith(f"{path}/")]
            if self._filesystem.isfile(path):
                doomed.append(path)
            self._remove(doomed)

    def delete_many(self, keys: Sequence[str]) -> None:
        with self._guard:
            self._remove([f"{self._root}/{key}" for key in keys])

    def _remove(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        if isinstance(self._filesystem, AsyncFileSystem):
            self._filesystem.rm([*paths])
            return
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.rm_file(path)


def _as_bytes(data: Data) -> bytes:
    return data if isinstance(data, bytes) else bytes(data)


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _creates_conditionally(filesystem: Any) -> bool:
    """Whether the file system takes `mode` itself; fsspec's own default looks first and writes later."""
    return (
        isinstance(filesystem, AsyncFileSystem)
        and type(filesystem)._pipe_file is not AsyncFileSystem._pipe_file
        and "mode" in inspect.signature(type(filesystem)._pipe_file).parameters
    )


def _of_the_connection(error: Exception) -> bool:
    return any(
        kind.__module__ == "botocore.exceptions" and kind.__name__ in ("ConnectionError", "HTTPClientError")
        for kind in type(error).__mro__
    )


def _error_code(error: BaseException) -> str | None:
    """The S3 error code behind an exception that s3fs translated."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    return response["Error"].get("Code") if response else None
