"""The directory behind a local object store, without fsspec: a sample costs what its system calls cost."""

import contextlib
import errno
import itertools
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Data = bytes | bytearray | memoryview
Found = list[bytes | Exception]
Entries = list[os.DirEntry[str]]


class UnsupportedStore(ValueError):
    """The back end of a store cannot create an object conditionally; the message says what can."""


class LocalFiles:
    """Objects as files under `root`. Keys are checked by the store above."""

    _writer = secrets.token_hex(4)
    _counter = itertools.count()

    def __init__(self, root: str):
        self._root = root

    def sub(self, prefix: str) -> "LocalFiles":
        return LocalFiles(f"{self._root}/{prefix}")

    def write(self, key: str, data: Data, durable: bool) -> None:
        path = f"{self._root}/{key}"
        self._write_aside(path, data, durable, os.replace)

    def create(self, key: str, data: Data, durable: bool) -> bool:
        path = f"{self._root}/{key}"
        if os.path.exists(path):
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
                _make_folder(folder, durable)
                continue
            try:
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
            return file.readall()

    def read_many(self, keys: Sequence[str]) -> Found:
        found: Found = []
        for key in keys:
            try:
                found.append(self.read(key))
            except OSError as error:
                found.append(error)
        return found

    def exists(self, key: str) -> bool:
        return os.path.isfile(f"{self._root}/{key}")

    def list(self, prefix: str) -> Iterable[str]:
        pending = [prefix]
        while pending:
            folder = pending.pop()
            for entry in self._scan(folder):
                key = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir():
                    pending.append(key)
                else:
                    yield key

    def folders(self, prefix: str) -> Iterable[str]:
        return (entry.name for entry in self._scan(prefix) if entry.is_dir())

    def _scan(self, prefix: str) -> Entries:
        try:
            with os.scandir(f"{self._root}/{prefix}") as entries:
                return [entry for entry in entries if not entry.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def delete(self, key: str) -> None:
        path = f"{self._root}/{key}"
        folder, _, name = path.rpartition("/")
        # Renamed first, so that a reader or a listing never sees a prefix half dropped.
        dropped = f"{folder}/.{name}.{self._writer}.{os.getpid()}.{next(self._counter)}"
        try:
            os.rename(path, dropped)
        except (FileNotFoundError, NotADirectoryError):
            return
        if not os.path.isdir(dropped):
            os.unlink(dropped)
        while os.path.isdir(dropped):
            shutil.rmtree(dropped, onerror=_unless_a_writer_was_quicker)

    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            _unlink(f"{self._root}/{key}")


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
