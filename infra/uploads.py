"""When the files of a live folder are uploaded again. Pure: it is told of files and of the time."""

from collections.abc import Mapping
from typing import NamedTuple


class Stamp(NamedTuple):
    """What tells a file's contents from earlier ones without reading it."""

    size: int  # bytes
    modified_ns: int


class Uploads:
    """Decides which files to put whole again.

    A file that grows all the time would cost more with every upload; so it waits after one for as long as
    its size takes at `bytes_per_s`, which bounds each file's cost whatever the length of the run.
    """

    def __init__(self, bytes_per_s: float):
        self._bytes_per_s = bytes_per_s
        self.held: dict[str, Stamp] = {}
        """What the store has, by key."""
        self._not_before: dict[str, float] = {}

    def due(self, files: Mapping[str, Stamp], now: float | None) -> list[str]:
        """Keys to upload, sorted. `now` in seconds of one clock; None uploads all that changed."""
        return sorted(
            key
            for key, stamp in files.items()
            if self.held.get(key) != stamp and (now is None or now >= self._not_before.get(key, now))
        )

    def done(self, key: str, stamp: Stamp, now: float | None) -> None:
        self.held[key] = stamp
        if now is not None:
            self._not_before[key] = now + stamp.size / self._bytes_per_s
