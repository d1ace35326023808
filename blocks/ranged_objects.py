"""An object store that also reads parts of objects."""

import os
from collections.abc import Sequence
from typing import Any

import fsspec

from infra.object_store import MissingObject, ObjectStore, OutsideStore, is_key


class RangedObjects(ObjectStore):
    """An `ObjectStore` with range reads: `pread` on a local directory, range requests elsewhere."""

    def __init__(self, url: str, options: dict[str, Any] | None = None):
        super().__init__(url, options)
        if self.is_held:
            self._root = self.url
        elif self.is_local:
            self._root = self.url.removeprefix("file://")
        else:
            filesystem, root = fsspec.core.url_to_fs(url, **(options or {}))
            self._filesystem, self._root = filesystem, root.rstrip("/")

    def get_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """The bytes (key, offset, size), fewer where the object ends. Raises `MissingObject`.

        As everywhere in an object store, ValueError for what is no key and `OutsideStore` for a link.
        """
        for key, _, _ in ranges:
            if not is_key(key):
                raise ValueError(f"{key!r} is no object key")
        if self.is_held:
            return [self.get(key)[offset : offset + size] for key, offset, size in ranges]
        paths = [f"{self._root}/{key}" for key, _, _ in ranges]
        if self.is_local:
            found: list[Any] = [self._read(*one, path) for one, path in zip(ranges, paths, strict=True)]
        else:
            found = self._filesystem.cat_ranges(
                paths,
                [offset for _, offset, _ in ranges],
                [offset + size for _, offset, size in ranges],
                on_error="return",
            )
        for (key, _, _), data in zip(ranges, found, strict=True):
            if isinstance(data, FileNotFoundError):
                raise MissingObject(self.url, key)
            if isinstance(data, Exception):
                raise data
        return found

    def _read(self, key: str, offset: int, size: int, path: str) -> bytes:
        if not os.path.realpath(path).startswith(os.path.realpath(self._root).rstrip("/") + "/"):
            raise OutsideStore(f"{key}: a symbolic link leads out of the store {self._root}")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise MissingObject(self.url, key) from None
        try:
            return os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)
