"""The index of a prefix in a Mooncake store: folders that may hold objects, and what names stand for.

Each state of the index is an object of its own, `index/000000000042`, written once and never changed. Since
Mooncake keeps the first of two writers of one name, writing the next number is a compare-and-swap: nothing
is half written for a reader, and a writer that is killed leaves the state before. A reader finds the newest
by a hint (a few slots that lag at most as many states as writers died in between) and looks onwards from it.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import xxhash

_LOOK_AHEAD = 8
_HINTS = 4
_PRESUMED_DEAD_S = 2.0
_TRIES = 200


@dataclass(frozen=True, slots=True)
class Index:
    """One state. Folders are of two parts and more, as `v00000007/3f9c`; a name maps to an object's name."""

    folders: frozenset[str] = frozenset()
    names: dict[str, str] = field(default_factory=dict)

    def with_folder(self, folder: str) -> "Index":
        return replace(self, folders=self.folders | {folder})

    def with_name(self, name: str, target: str) -> "Index":
        return replace(self, names={**self.names, name: target})

    def without_names(self, names: Sequence[str]) -> "Index":
        return replace(self, names={name: to for name, to in self.names.items() if name not in names})

    def without_names_beneath(self, prefix: str) -> "Index":
        return self.without_names([name for name in self.names if name.startswith(f"{prefix}/")])

    def without(self, prefix: str) -> "Index":
        """Without the folder of this name, and all folders and names beneath it."""
        kept = {folder for folder in self.folders if folder != prefix and not folder.startswith(f"{prefix}/")}
        return replace(self.without_names_beneath(prefix), folders=frozenset(kept))

    def dump(self, writer: str) -> bytes:
        """As JSON; `writer` tells this try from another writer's."""
        content = {"folders": sorted(self.folders), "names": self.names, "writer": writer}
        return _seal(json.dumps(content).encode())

    @classmethod
    def load(cls, data: Any) -> "Index | None":
        """None for what is no state: one that was removed while it was read."""
        unsealed = _unseal(data)
        if unsealed is None:
            return None
        content = json.loads(unsealed)
        return cls(frozenset(content["folders"]), content["names"])


class Client(Protocol):
    """What the log needs of a store. Of two `put`s of one name the first stays."""

    def put(self, name: str, data: bytes) -> None: ...
    def get(self, name: str) -> Any: ...
    def existing(self, names: Sequence[str]) -> list[bool]: ...
    def remove(self, names: Sequence[str]) -> None: ...


class IndexLog:
    """Reads and changes the index under `prefix`."""

    def __init__(self, client: Client, prefix: str, *, presumed_dead_s: float = _PRESUMED_DEAD_S):
        self._client = client
        self._prefix = prefix
        self._presumed_dead_s = presumed_dead_s
        self._seen = 0
        self._one_at_a_time = threading.Lock()

    def read(self) -> Index:
        """The newest state; an empty one before the first."""
        return self._newest()[1]

    def change(self, change: Callable[[Index], Index]) -> Index:
        """Put `change` of the newest state in its place, and return the state that it was applied to.

        `change` is called again when another writer was quicker. Raises TimeoutError after very many tries.
        """
        with self._one_at_a_time:
            return self._change(change)

    def _change(self, change: Callable[[Index], Index]) -> Index:
        writer = secrets.token_hex(8)
        for _ in range(_TRIES):
            number, index = self._newest()
            changed = change(index)
            if changed == index:
                return index
            data = changed.dump(writer)
            written = self._append(number + 1, data)
            # A number that a slower writer was given up on may still appear, below the newest.
            if written is not None and self._newest()[0] == written:
                self._tidy(written)
                return index
        raise TimeoutError(f"other writers kept this one from changing the index {self._prefix}")

    def _append(self, number: int, data: bytes) -> int | None:
        """The number under which the data now is; None when another writer has that number."""
        for candidate in range(number, number + _LOOK_AHEAD):
            self._client.put(self._state(candidate), data)
            deadline = time.monotonic() + self._presumed_dead_s
            found = self._client.get(self._state(candidate))
            while found is None and time.monotonic() < deadline:
                time.sleep(0.02)  # another writer is in the middle of it
                found = self._client.get(self._state(candidate))
            if found is not None:
                return candidate if bytes(found) == data else None
        return None

    def _newest(self) -> tuple[int, Index]:
        for _ in range(_TRIES):
            number = self._newest_number()
            if number == 0:
                return 0, Index()
            data = self._client.get(self._state(number))
            index = Index.load(data) if data is not None else None
            if index is not None:
                return number, index
            # So many states followed that this one is removed, or the store was emptied.
            self._seen = 0
        raise TimeoutError(f"the index {self._prefix} changes too fast to be read")

    def _newest_number(self) -> int:
        hints = [self._client.get(f"{self._prefix}/hint/{slot}") for slot in range(_HINTS)]
        numbers = [_unseal(hint) for hint in hints if hint is not None]
        number = max([self._seen, *(int(hint) for hint in numbers if hint is not None)])
        while True:
            ahead = range(number + _LOOK_AHEAD, number, -1)
            existing = self._client.existing([self._state(candidate) for candidate in ahead])
            found = [candidate for candidate, exists in zip(ahead, existing, strict=True) if exists]
            if not found:
                self._seen = number
                return number
            number = found[0]

    def _tidy(self, number: int) -> None:
        slot = f"{self._prefix}/hint/{number % _HINTS}"
        self._client.remove([slot, self._state(number - _LOOK_AHEAD)])
        # All of one length: a reader asks for an object's size first, and another may lie there by then.
        self._client.put(slot, _seal(f"{number:012d}".encode()))

    def _state(self, number: int) -> str:
        return f"{self._prefix}/{max(number, 0):012d}"


def _seal(data: bytes) -> bytes:
    """With a checksum: memory of an object that is removed while it is read may hold another by then."""
    return xxhash.xxh3_128_digest(data) + data


def _unseal(data: Any) -> bytes | None:
    digest, content = bytes(data[:16]), bytes(data[16:])
    return content if xxhash.xxh3_128_digest(content) == digest else None
