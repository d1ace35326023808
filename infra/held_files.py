"""Objects of an object store that this process holds and nobody else sees: for a simulation's few minutes.

Unlike fsspec's `memory://`, which looks through all that it has for many an operation, each costs a look-up.
"""

import threading
from collections.abc import Iterable, Sequence

from infra.local_files import Data, Found

SCHEME = "held"


class HeldFiles:
    """The objects under one root. Made by `at`; safe for concurrent use by threads."""

    _held: dict[str, dict[str, bytes]] = {}  # by the first part of the path
    _lock = threading.RLock()

    def __init__(self, objects: dict[str, bytes], root: str):
        self._objects = objects
        self._root = f"{root}/" if root else ""

    @classmethod
    def at(cls, path: str) -> "HeldFiles":
        """What `held://<path>` names; its first part is the name under which `forget` drops it."""
        name, _, root = path.strip("/").partition("/")
        with cls._lock:
            return cls(cls._held.setdefault(name, {}), root)

    @classmethod
    def forget(cls, name: str) -> None:
        """Drop everything under `held://<name>`."""
        with cls._lock:
            cls._held.pop(name, None)

    def sub(self, prefix: str) -> "HeldFiles":
        return HeldFiles(self._objects, f"{self._root}{prefix}")

    def write(self, key: str, data: Data, durable: bool) -> None:
        with self._lock:
            self._objects[self._root + key] = bytes(data)

    def create(self, key: str, data: Data, durable: bool) -> bool:
        path = self._root + key
        with self._lock:
            if path in self._objects:
                return False
            self._objects[path] = bytes(data)
            return True

    def read(self, key: str) -> bytes:
        try:
            return self._objects[self._root + key]
        except KeyError:
            raise FileNotFoundError(key) from None

    def read_many(self, keys: Sequence[str]) -> Found:
        return [self._objects.get(self._root + key, FileNotFoundError(key)) for key in keys]

    def exists(self, key: str) -> bool:
        return self._root + key in self._objects

    def list(self, prefix: str) -> Iterable[str]:
        base = f"{self._root}{prefix}/" if prefix else self._root
        with self._lock:
            return [path.removeprefix(self._root) for path in self._objects if path.startswith(base)]

    def folders(self, prefix: str) -> Iterable[str]:
        skip = len(prefix) + 1 if prefix else 0
        below = (key[skip:].partition("/") for key in self.list(prefix))
        return {name for name, slash, _ in below if slash}

    def delete(self, key: str) -> None:
        self.delete_many([key, *self.list(key)])

    def delete_many(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._objects.pop(self._root + key, None)
