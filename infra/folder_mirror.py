"""A copy of a live local folder in an object store, so that it can be read and taken over from elsewhere.

    <key>          each file of the folder, under its own path
    mirror.json    written last by each push: whose folder it is, and its files

The folder stays what its processes write and read; the store follows. A crash loses what was written since
the last push. One folder writes a mirror at a time: a folder that finds another's name in `mirror.json` has
been taken over, and pushes no more.
"""

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.blocking_calls import in_daemon_thread
from infra.clock import now
from infra.object_store import MissingObject, ObjectStore, is_key
from infra.uploads import Stamp, Uploads

logger = logging.getLogger(__name__)

MARKER = "mirror.json"
_IDENTITY = ".mirror"
_BYTES_PER_S = 2.0**20
_LAST_PUSH_LIMIT_S = 30.0
"""Of a run that failed: its store may be what failed."""


class MirrorTakenOver(RuntimeError):
    """Another folder, on this machine or another, writes this mirror now."""


class MirrorDamaged(ValueError):
    """`mirror.json` cannot be read."""


class _Marker(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    writer: str
    files: dict[str, Stamp]


class FolderMirror:
    """The mirror of `folder` in `store`. Folders named in `skip`, at the top, are left out.

    Hidden files (a dot first) and files whose name is no object key stay local: drafts and locks.
    Safe for use by threads, one push at a time.
    """

    def __init__(self, folder: Path, store: ObjectStore, skip: frozenset[str] = frozenset()):
        self._folder = folder
        self._store = store
        self._skip = skip
        self._uploads = Uploads(_BYTES_PER_S)
        self._began = False
        self._pushing = threading.Lock()

    def restore(self) -> list[str]:
        """Bring the folder up to the store, unless the folder itself wrote last. Returns what was fetched.

        Each file is replaced whole. The next push takes the mirror over. Raises `MirrorDamaged` before
        anything is written, `MissingObject`, or `OutsideStore` for a link that leads out of the folder.
        """
        self._began = False
        marker = self._read_marker()
        if marker is None or marker.writer == self._identity():
            return []
        local = ObjectStore(str(self._folder))
        fetched = [key for key in sorted(marker.files) if key.split("/")[0] not in self._skip]
        for key in fetched:
            local.put(key, self._store.get(key))
        return fetched

    def push(self, at: float | None = None, only: Collection[str] | None = None) -> list[str]:
        """Upload what changed, and say so in `mirror.json`. Returns the keys uploaded.

        `at` (seconds) lets big files that keep changing wait; without it everything is uploaded. `only`
        names the keys to look at. The first push takes the mirror over; a later one raises `MirrorTakenOver`
        when another folder has.
        """
        with self._pushing:
            identity = self._identity(create=True)
            marker = self._read_marker()
            mine = marker is not None and marker.writer == identity
            if self._began and not mine:
                raise MirrorTakenOver(
                    f"{self._store.url} is written from another folder than {self._folder} now: "
                    "this one is no longer the run"
                )
            if marker is not None and mine and not self._began:
                self._uploads.held = dict(marker.files)
            files = {key: stamp for key, stamp in self._files() if only is None or key in only}
            due = [key for key in self._uploads.due(files, at) if self._upload(key, files[key], at)]
            if due or not mine:
                held = _Marker(writer=str(identity), files=self._uploads.held)
                self._store.put(MARKER, held.model_dump_json().encode())
            self._began = True
            return due

    @asynccontextmanager
    async def following(self, every_s: float) -> AsyncIterator[None]:
        """Push every so often, and everything at the end.

        A push that fails on the way is tried again; the last one's failure is raised, unless the body
        failed.
        """
        pushing = asyncio.create_task(self._follow(every_s))
        try:
            yield
        except BaseException:
            await _ended(pushing)
            try:
                async with asyncio.timeout(_LAST_PUSH_LIMIT_S):
                    await asyncio.shield(in_daemon_thread(self.push))
            except Exception as error:
                logger.warning("the last state of %s was not uploaded: %s", self._folder, error)
            raise
        await _ended(pushing)
        await asyncio.to_thread(self.push)

    async def _follow(self, every_s: float) -> None:
        while True:
            try:
                await in_daemon_thread(partial(self.push, now()))
            except MirrorTakenOver as error:
                logger.warning("%s", error)
                return
            except Exception as error:
                # Whatever the store's client raises: it may be back at the next turn.
                logger.warning("%s was not uploaded, and will be tried again: %s", self._folder, error)
            await asyncio.sleep(every_s)

    def _upload(self, key: str, stamp: Stamp, at: float | None) -> bool:
        try:
            data = (self._folder / key).read_bytes()
        except FileNotFoundError:
            return False
        self._store.put(key, data)
        self._uploads.done(key, stamp, at)
        return True

    def _files(self) -> Iterator[tuple[str, Stamp]]:
        for path, folders, names in os.walk(self._folder):
            inside = Path(path).relative_to(self._folder)
            if inside == Path():
                folders[:] = [name for name in folders if name not in self._skip]
            folders[:] = [name for name in folders if is_key(name)]
            for name in names:
                file = Path(path) / name
                if not is_key(name) or file.is_symlink() or (inside == Path() and name == MARKER):
                    continue
                try:
                    status = file.stat()
                except FileNotFoundError:
                    continue
                yield (inside / name).as_posix(), Stamp(status.st_size, status.st_mtime_ns)

    def _identity(self, *, create: bool = False) -> str | None:
        path = self._folder / _IDENTITY
        if create and not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(secrets.token_hex(8))
        return path.read_text() if path.exists() else None

    def _read_marker(self) -> _Marker | None:
        try:
            marker = _Marker.model_validate_json(self._store.get(MARKER))
        except MissingObject:
            return None
        except ValidationError as error:
            raise MirrorDamaged(f"{MARKER} in {self._store.url} cannot be read: {error}") from None
        if strange := [name for name in marker.files if not is_key(name)]:
            raise MirrorDamaged(f"{MARKER} in {self._store.url} names {strange[0]!r}, which is no object key")
        return marker


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
