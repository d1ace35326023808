"""Objects in a Mooncake store, which has neither folders nor listings nor replacement: an index adds them.

The bytes lie in the memory of Mooncake's store processes (`infra.mooncake`), pinned: a full store refuses to
write and never drops an object that is still named. A client here lends no memory, so what it wrote survives
it. Every object is written once, under a name that is used once. What can be replaced (a manifest) is a name
in the index that stands for such an object, so that a reader sees the old one or the new one, whole.
"""

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from blocks.mooncake_client import (
    MooncakeClient,
    MooncakeSettings,
    Ranges,
    WeightStoreUnavailable,
    shared_client,
)
from blocks.mooncake_index import IndexLog
from infra.object_store import Data, MissingObject

__all__ = ["MooncakeClient", "MooncakeObjects", "MooncakeSettings", "WeightStoreUnavailable"]

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*(/[A-Za-z0-9_][A-Za-z0-9_.=+-]*)*")


class MooncakeObjects:
    """Objects under a prefix of a Mooncake store, by the methods that a weight store needs.

    Keys are parts joined by `/`. Safe for concurrent use by threads; `open` shares one client among all
    stores of a process. One process at a time should put and delete under a prefix; others may read.
    """

    def __init__(self, client: MooncakeClient, prefix: str, *, replaceable: str = "manifest.json"):
        """Keys whose last part is `replaceable` may be put again; others are written once."""
        self.url = f"mooncake://{client.settings.master}/{prefix}"
        self._client = client
        self._prefix = prefix
        self._replaceable = replaceable
        self._log = IndexLog(client, f"{prefix}/index")
        self._known: set[str] = set()

    @classmethod
    def open(cls, url: str, options: dict[str, Any] | None = None) -> "MooncakeObjects":
        """Raises ValueError on a wrong URL, `WeightStoreUnavailable` where no master answers."""
        settings, prefix = MooncakeSettings.parse(url, options)
        return cls(shared_client(settings), prefix)

    def __repr__(self) -> str:
        return f"MooncakeObjects({self.url!r})"

    def alive(self) -> None:
        """Return once the master has answered, which may take as long as the package waits: 30 s.

        Raises `WeightStoreUnavailable`. That something listens says nothing: a frozen master still does.
        """
        self._client.existing([f"{self._prefix}/alive"])

    def put(self, key: str, data: Data, *, durable: bool = False) -> None:
        """Write an object. Raises `WeightStoreUnavailable` when the store has no room for it.

        `durable` is taken and has no effect: memory survives no power cut, and `replicas` is what protects.
        """
        folder, _, last = _checked(key).rpartition("/")
        if last == self._replaceable:
            name = f"{key}@{secrets.token_hex(8)}"
            self._client.put(f"{self._prefix}/{name}", data)
            replaced = self._log.change(lambda index: index.with_name(key, name)).names.get(key)
            if replaced not in (None, name):
                self._client.remove([f"{self._prefix}/{replaced}"])
            return
        # The index names a folder before anything is in it, so that nothing is ever unreachable.
        if folder not in self._known:
            self._log.change(lambda index: index.with_folder(folder))
            self._known.add(folder)
        self._client.put(f"{self._prefix}/{key}", data)

    def get(self, key: str) -> bytes:
        """The object. Raises `MissingObject`."""
        while True:
            (name,) = self._names([key])
            data = bytes(self._whole(key, name))
            # Replaced while it was read, its memory may have been another's.
            if self._names([key]) == [name]:
                return data

    def get_many(self, keys: Sequence[str]) -> list[bytes | bytearray | memoryview]:
        """Objects in the order asked. Raises `MissingObject`."""
        return [self._whole(key, name) for key, name in zip(keys, self._names(keys), strict=True)]

    def get_ranges(self, ranges: Ranges) -> list[memoryview]:
        """The bytes (key, offset, size) of objects that were written once. Raises `MissingObject`.

        A range that reaches beyond its object comes back empty.
        """
        names = self._names([key for key, _, _ in ranges])
        wanted = [
            (f"{self._prefix}/{name}", offset, size)
            for name, (_, offset, size) in zip(names, ranges, strict=True)
        ]
        found = self._client.get_ranges(wanted)
        for (key, _, size), (name, _, _), data in zip(ranges, wanted, found, strict=True):
            if size and not data and self._client.size(name) is None:
                raise MissingObject(self.url, key)
        return found

    def exists(self, key: str) -> bool:
        if _checked(key).rpartition("/")[2] == self._replaceable:
            return key in self._log.read().names
        return self._client.size(f"{self._prefix}/{key}") is not None

    def folders(self, prefix: str = "") -> list[str]:
        """Names of the parts directly beneath a prefix that have keys beneath them, sorted."""
        index = self._log.read()
        under = f"{prefix}/" if prefix else ""
        paths = [*(f"{folder}/" for folder in index.folders), *index.names]
        inner = [path.removeprefix(under) for path in paths if path.startswith(under)]
        return sorted({path.partition("/")[0] for path in inner if "/" in path})

    def delete(self, key: str) -> None:
        """Remove the object of a key and all beneath it as a prefix, also what a killed writer left.

        A reader that is in the middle of one of the objects gets an error or a checksum that does not match.
        """
        _checked(key)
        self._log.change(lambda index: index.without_names_beneath(key))
        self.delete_many([key])
        self._client.remove_beneath(f"{self._prefix}/{key}")
        self._log.change(lambda index: index.without(key))
        self._known = {known for known in self._known if known != key and not known.startswith(f"{key}/")}

    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove objects, not prefixes; missing ones are no error."""
        keys = [_checked(key) for key in keys]
        names = self._log.change(lambda index: index.without_names(keys)).names
        self._client.remove([f"{self._prefix}/{names.get(key, key)}" for key in keys])

    def _names(self, keys: Sequence[str]) -> list[str]:
        """What each key stands for at present."""
        if not any(_checked(key).rpartition("/")[2] == self._replaceable for key in keys):
            return list(keys)
        index = self._log.read()
        return [index.names.get(key, key) for key in keys]

    def _whole(self, key: str, name: str) -> memoryview:
        data = self._client.get(f"{self._prefix}/{name}")
        while data is None:
            # A replaced object goes at once: the key may stand for another one by now.
            (latest,) = self._names([key])
            if latest == name:
                raise MissingObject(self.url, key)
            name = latest
            data = self._client.get(f"{self._prefix}/{name}")
        return data


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"{key!r} is no key of a weight store: parts are letters, digits and _.=+-, joined by '/'"
        )
    return key
