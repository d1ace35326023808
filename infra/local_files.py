"""The directory behind a local object store, without fsspec: a sample costs what its system calls cost."""

import contextlib
import errno
import itertools
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Data = bytes | bytearray | memoryview
Found = list[bytes | Exception]
Entries = list[os.DirEntry[str]]


class UnsupportedStore(ValueError):
    """The back end of a store cannot create an object conditionally; the message says what can."""


class OutsideStore(ValueError):
    """A symbolic link in a local store leads out of it."""


class LocalFiles:
    """Objects as files under `root`. Keys are checked by the store above; links are checked here.

    Where an opened file really lies is asked of the system afterwards, by its descriptor: one system call,
    and no window in which a link could be put in its place.
    """

    _writer = secrets.token_hex(4)
    _counter = itertools.count()

    def __init__(self, root: str, real_root: str | None = None):
        self._root = root
        self._real = real_root or os.path.realpath(root)

    def sub(self, prefix: str) -> "LocalFiles":
        # A sub-store's folder may be renamed while it is dropped, so the whole store bounds its links.
        return LocalFiles(f"{self._root}/{prefix}", self._real)

    def write(self, key: str, data: Data, durable: bool) -> None:
        path = f"{self._root}/{key}"
        self._write_aside(path, data, durable, os.replace)

    def create(self, key: str, data: Data, durable: bool) -> bool:
        path = f"{self._root}/{key}"
        if os.path.lexists(path):
            return False
        try:
            self._write_aside(path, data, durable, _link)
        except FileExistsError:
            return False
        return True

    def _write_aside(self, path: str, data: Data, durable: bool, publish: Callable[[str, str], None]) -> None:
        """Write beside the final name, then give it that name in one step."""
        folder, _, name = path.rpartition("/")
        while True:
            aside = f"{folder}/.{name}.{self._writer}.{os.getpid()}.{next(self._counter)}"
            try:
                descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                self._require_folder_inside(folder)
                _make_folder(folder, durable)
                continue
            try:
                self._require_inside(descriptor, aside)
                _write_all(descriptor, data)
                if durable:
                    os.fsync(descriptor)
                publish(aside, path)
            except FileNotFoundError:
                continue  # the prefix was dropped meanwhile, with this file in it
            except BaseException:
                _unlink(aside)
                raise
            finally:
                os.close(descriptor)
            break
        if durable:
            _sync_folder(folder)

    def read(self, key: str) -> bytes:
        with open(f"{self._root}/{key}", "rb", buffering=0) as file:
            self._require_inside(file.fileno(), key)
            return file.readall()

    def read_many(self, keys: Sequence[str]) -> Found:
        found: Found = []
        for key in keys:
            try:
                found.append(self.read(key))
            except (OSError, OutsideStore) as error:
                found.append(error)
        return found

    def exists(self, key: str) -> bool:
        path = f"{self._root}/{key}"
        return os.path.isfile(path) and self._lies_inside(os.path.realpath(path))

    def list(self, prefix: str) -> Iterable[str]:
        pending = [prefix]
        while pending:
            folder = pending.pop()
            for entry in self._scan(folder):
                key = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    pending.append(key)
                elif not entry.is_symlink():
                    yield key

    def folders(self, prefix: str) -> Iterable[str]:
        return (entry.name for entry in self._scan(prefix) if entry.is_dir(follow_symlinks=False))

    def _scan(self, prefix: str) -> Entries:
        folder = f"{self._root}/{prefix}" if prefix else self._root
        self._require_folder_inside(folder)
        try:
            with os.scandir(folder) as entries:
                return [entry for entry in entries if not entry.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def delete(self, key: str) -> None:
        path = f"{self._root}/{key}"
        folder, _, name = path.rpartition("/")
        self._require_folder_inside(folder)
        # Renamed first, so that a reader or a listing never sees a prefix half dropped.
        dropped = f"{folder}/.{name}.{self._writer}.{os.getpid()}.{next(self._counter)}"
        try:
            os.rename(path, dropped)
        except (FileNotFoundError, NotADirectoryError):
            return
        if os.path.islink(dropped) or not os.path.isdir(dropped):
            os.unlink(dropped)
        while os.path.isdir(dropped):
            shutil.rmtree(dropped, onerror=_unless_a_writer_was_quicker)

    def delete_many(self, keys: Sequence[str]) -> None:
        folders = {f"{self._root}/{key}".rpartition("/")[0] for key in keys}
        for folder in folders:
            self._require_folder_inside(folder)
        for key in keys:
            _unlink(f"{self._root}/{key}")

    def _lies_inside(self, real_path: str) -> bool:
        return real_path == self._real or real_path.startswith(self._real.rstrip("/") + "/")

    def _require_inside(self, descriptor: int, what: str) -> None:
        if not self._lies_inside(_path_of(descriptor)):
            raise OutsideStore(f"{what}: a symbolic link leads out of the store {self._root}")

    def _require_folder_inside(self, folder: str) -> None:
        if not self._lies_inside(os.path.realpath(folder)):
            raise OutsideStore(f"{folder}: a symbolic link leads out of the store {self._root}")


def _path_of(descriptor: int) -> str:
    """Where an open file really lies."""
    if sys.platform == "darwin":
        import fcntl

        return os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _unless_a_writer_was_quicker(_function: object, _path: str, error: Any) -> None:
    """A writer may finish or give up a file in a folder that is being removed."""
    problem = error[1]
    if not isinstance(problem, FileNotFoundError) and getattr(problem, "errno", None) != errno.ENOTEMPTY:
        raise problem


def _link(aside: str, path: str) -> None:
    try:
        os.link(aside, path)
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError as error:
        raise UnsupportedStore(
            f"the file system of {path} has no hard links, which conditional creation needs ({error}): "
            "point this store (stores.samples or stores.runs) at another file system or at an object store"
        ) from None
    os.unlink(aside)


def _write_all(descriptor: int, data: Data) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def _make_folder(folder: str, durable: bool) -> None:
    if not durable:
        # makedirs raises this, in spite of exist_ok, for a folder that is dropped while it looks.
        with contextlib.suppress(FileExistsError):
            os.makedirs(folder, exist_ok=True)
        return
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for path in reversed(missing):
        os.makedirs(path, exist_ok=True)
        _sync_folder(os.path.dirname(path))


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)
