"""An object store: whole objects under keys, on a local directory, in memory, or at any fsspec URL.

Two promises hold on every back end. A reader sees an object whole or not at all. `create` is conditional:
of any number of concurrent writers of one key, on any number of machines, exactly one succeeds.
"""

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import fsspec

from infra.held_files import SCHEME, HeldFiles
from infra.local_files import Data, LocalFiles, OutsideStore, UnsupportedStore
from infra.remote_files import RemoteFiles

__all__ = ["Data", "MissingObject", "ObjectStore", "OutsideStore", "UnsupportedStore", "is_key"]

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@,-]*")
Keys = list[str]
Objects = list[bytes]


class MissingObject(KeyError):
    """There is no object under this key."""

    def __init__(self, url: str, key: str):
        super().__init__(url, key)
        self.url = url
        self.key = key

    def __str__(self) -> str:
        return f"there is no object {self.key!r} in {self.url}"


class ObjectStore:
    """Objects under `url`: a path or file:// is a local directory, memory:// this process, else fsspec.
    held:// is this process as well, quicker, until `infra.held_files.HeldFiles.forget`.

    Keys are parts joined by `/`; a part is letters, digits and `_.=+@,-` and starts with a letter, a digit
    or `_`, so that no key leaves the prefix and none is mistaken for a pattern or a temporary file. Another
    key raises ValueError. No key may be a prefix of another (a directory is no file). A *prefix* is whole
    parts too (`batches` is no prefix of `batches2/x`).
    In a directory no symbolic link is followed out of `url`: an operation that would raises `OutsideStore`,
    and listings leave links out. `url` itself may be a link. A remote URL with a part `..` is refused.
    Safe for concurrent use by threads. `options` go to the fsspec file system; credentials and endpoint need
    not, for they are in the environment (`infra.credentials`).
    """

    def __init__(self, url: str, options: dict[str, Any] | None = None):
        protocol = fsspec.core.split_protocol(url)[0]
        self.is_local = protocol in (None, "file", "local", SCHEME)
        backend: LocalFiles | RemoteFiles | HeldFiles
        self.is_held = protocol == SCHEME
        if self.is_held:
            self.url = url.rstrip("/")
            backend = HeldFiles.at(url.removeprefix(f"{SCHEME}://"))
        elif self.is_local:
            root = os.path.abspath(os.path.expanduser(url.removeprefix(f"{protocol}://")))
            self.url = root if protocol is None else f"file://{root}"
            backend = LocalFiles(root)
        else:
            if ".." in url.split("/"):
                raise ValueError(f"{url!r} has a part '..': write where the store lies without it")
            # Other writers exist: a cached listing would hide what they wrote.
            listing = {} if protocol == "memory" else {"use_listings_cache": False}
            filesystem, root = fsspec.core.url_to_fs(url, **{**listing, **(options or {})})
            self.url = url.rstrip("/")
            backend = RemoteFiles(filesystem, root.rstrip("/"))
        self._files = backend

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def put(self, key: str, data: Data, *, durable: bool = False) -> None:
        """Write an object, in place of what was there.

        With `durable` a local object survives a power cut once this returns (fsync); others always do.
        """
        self._files.write(_checked(key), data, durable)

    def create(self, key: str, data: Data, *, durable: bool = False) -> bool:
        """Write an object if there is none under the key; False, and nothing changed, when there is.

        A remote store may answer False to a request whose first try had succeeded unseen (a retry after a
        lost answer): a writer to whom that matters writes something unique and reads the object back.
        Raises `UnsupportedStore` where the back end cannot do it atomically.
        """
        return self._files.create(_checked(key), data, durable)

    def get(self, key: str) -> bytes:
        """The object. Raises `MissingObject`."""
        try:
            return self._files.read(_checked(key))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise MissingObject(self.url, key) from None

    def get_many(self, keys: Sequence[str]) -> Objects:
        """Objects in the order of `keys`, read concurrently where that pays. Raises `MissingObject`."""
        found = self._files.read_many([_checked(key) for key in keys])
        for key, value in zip(keys, found, strict=True):
            if isinstance(value, FileNotFoundError | NotADirectoryError | IsADirectoryError):
                raise MissingObject(self.url, key)
            if isinstance(value, Exception):
                raise value
        return [value for value in found if not isinstance(value, Exception)]

    def exists(self, key: str) -> bool:
        return self._files.exists(_checked(key))

    def list(self, prefix: str = "") -> Keys:
        """All keys beneath a prefix, at any depth, sorted; none when there is nothing."""
        return sorted(self._files.list(_checked(prefix) if prefix else ""))

    def folders(self, prefix: str = "") -> Keys:
        """Names of the parts directly beneath a prefix that have keys beneath them, sorted.

        A cheap listing: some back ends also name a part whose keys are all deleted.
        """
        return sorted(self._files.folders(_checked(prefix) if prefix else ""))

    def delete(self, key: str) -> None:
        """Remove the object of this key and every object beneath it as a prefix; no error without any."""
        self._files.delete(_checked(key))

    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove objects, not prefixes, in as few requests as the back end can; missing ones are no error."""
        self._files.delete_many([_checked(key) for key in keys])

    def sub(self, prefix: str) -> "ObjectStore":
        """The store of everything beneath a prefix."""
        store = object.__new__(ObjectStore)
        store.is_local = self.is_local
        store.is_held = self.is_held
        store.url = f"{self.url}/{_checked(prefix)}"
        store._files = self._files.sub(prefix)
        return store


def is_key(text: str) -> bool:
    """Whether this may be an object's key, and so can name nothing outside of its store."""
    return all(_PART.fullmatch(part) for part in text.split("/"))


def _checked(key: str) -> str:
    if not is_key(key):
        raise ValueError(
            f"{key!r} is no object key: parts are joined by '/', and each is letters, digits and _.=+@,- "
            "starting with a letter, a digit or _"
        )
    return key
