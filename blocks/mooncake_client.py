"""A client of a Mooncake store: its settings, and the package's calls with typed errors."""

import os
import re
import socket
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from pydantic import PositiveFloat, PositiveInt, ValidationError

from infra.config import Config
from infra.mooncake import TCP_DEFAULTS
from infra.object_store import Data

_PREFIX = re.compile(r"[A-Za-z0-9_.=+-]+(/[A-Za-z0-9_.=+-]+)*")
_SETUP = {"MC_STORE_CLIENT_SETUP_RETRIES": "2"}
"""Twenty tries of five seconds are the default; that a master listens has been seen before."""
_QUIET = {"MC_LOG_LEVEL": "ERROR"}
"""What it does is in no one's way on the screen of a campaign."""
_NO_SPACE = -200
_LEASE_EXPIRED = -707  # the read took longer than the master keeps an object for a reader
_READS = 3
_ABSENT = (-703, -704)  # another client is in the middle of writing it, or there is none
Ranges = Sequence[tuple[str, int, int]]


class WeightStoreUnavailable(ConnectionError):
    """The store cannot be reached, has no room, or its client package is missing."""


class MooncakeSettings(Config):
    """Of one client; each is also a parameter of the URL, as in `mooncake://host:port/run?protocol=rdma`."""

    master: str
    """`host:port` of the master."""
    metadata: str = "P2PHANDSHAKE"
    """Metadata server of the transfer engine; the default needs none."""
    host: str = "127.0.0.1"
    """This machine's address as the store's machines see it."""
    protocol: str = "tcp"
    device: str = ""
    """RDMA devices, separated by commas."""
    replicas: PositiveInt = 1
    """Copies of each object, on different store processes."""
    buffer_mib: PositiveInt = 16
    """Memory of this client for small transfers; buckets go straight from and to their own memory."""
    connect_limit_s: PositiveFloat = 5.0

    @classmethod
    def parse(cls, url: str, options: dict[str, Any] | None = None) -> tuple["MooncakeSettings", str]:
        """The settings and the prefix that a URL and options name. Raises ValueError."""
        parts = urlsplit(url)
        prefix = parts.path.strip("/") or "tutti"
        if parts.scheme != "mooncake" or ":" not in parts.netloc or not _PREFIX.fullmatch(prefix):
            raise ValueError(
                f"{url!r} is no Mooncake URL (stores.weights): mooncake://host:port/prefix, "
                "its prefix of letters, digits and _.=+-"
            )
        given = {**dict(parse_qsl(parts.query)), **(options or {})}
        try:
            return cls.model_validate({"master": parts.netloc, **given}), prefix
        except ValidationError as error:
            raise ValueError(f"{url!r} (stores.weights) or its options: {error}") from None


class MooncakeClient:
    """The package's client with typed errors. `None` means that there is no such object."""

    def __init__(self, settings: MooncakeSettings):
        self.settings = settings
        package = _package()
        _require_listener(settings)
        self._store = package.MooncakeDistributedStore()
        status = self._store.setup(
            settings.host,
            settings.metadata,
            0,  # no memory of its own: what it writes must outlive it
            settings.buffer_mib * 2**20,
            settings.protocol,
            settings.device,
            settings.master,
        )
        if status != 0:
            raise WeightStoreUnavailable(
                f"cannot join the Mooncake store of {settings.master} (stores.weights): status {status}"
            )
        self._replicate = package.ReplicateConfig()
        self._replicate.replica_num = settings.replicas
        self._replicate.with_hard_pin = True

    def put(self, name: str, data: Data) -> None:
        """Write an object; of two writers of one name the first wins, and this does not say which."""
        view = np.frombuffer(data, np.uint8)
        if not len(view):
            raise ValueError(f"Mooncake stores no empty objects: {name}")
        status = self._registered(view, lambda: self._store.put_from(name, *_memory(view), self._replicate))
        if status == _NO_SPACE:
            raise WeightStoreUnavailable(
                f"the Mooncake store of {self.settings.master} has no room for {len(view)} bytes: raise the "
                "store process's segment_gib, or keep fewer versions"
            )
        self._demand(status, name)

    def get(self, name: str) -> memoryview | None:
        size = self.size(name)
        if size is None:
            return None
        target = np.empty(size, np.uint8)
        status = _LEASE_EXPIRED
        for _ in range(_READS):
            status = self._registered(target, lambda: self._store.get_into(name, *_memory(target)))
            if status != _LEASE_EXPIRED:
                break
        if status in _ABSENT:
            return None
        self._demand(status, name)
        return target.data

    def get_ranges(self, ranges: Ranges) -> list[memoryview]:
        """A range of an object that is missing or shorter comes back empty."""
        starts = np.cumsum([0, *(size for _, _, size in ranges)])
        target = np.empty(max(int(starts[-1]), 1), np.uint8)
        names: dict[str, list[int]] = {}
        for index, (name, _, size) in enumerate(ranges):
            if size:
                names.setdefault(name, []).append(index)
        statuses: list[Any] = []
        for _ in range(_READS):
            statuses = self._registered(
                target,
                lambda: self._store.get_into_ranges(
                    [target.ctypes.data],
                    [list(names)],
                    [[[int(starts[index]) for index in indices] for indices in names.values()]],
                    [[[ranges[index][1] for index in indices] for indices in names.values()]],
                    [[[ranges[index][2] for index in indices] for indices in names.values()]],
                ),
            )[0]
            if not any(_LEASE_EXPIRED in results for results in statuses):
                break
        found = [
            target[start : start + size].data
            for start, (_, _, size) in zip(starts[:-1].tolist(), ranges, strict=True)
        ]
        for indices, results in zip(names.values(), statuses, strict=True):
            for index, status in zip(indices, results, strict=True):
                if status != ranges[index][2]:
                    found[index] = memoryview(b"")
        return found

    def size(self, name: str) -> int | None:
        size: int = self._store.get_size(name)
        if size in _ABSENT:
            return None
        self._demand(size, name)
        return size

    def existing(self, names: Sequence[str]) -> list[bool]:
        statuses = self._store.batch_is_exist(list(names))
        for name, status in zip(names, statuses, strict=True):
            self._demand(status, name)
        return [status == 1 for status in statuses]

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, also ones that are being read; missing ones are no error."""
        if names:
            for name, status in zip(names, self._store.batch_remove(list(names), True), strict=True):
                if status not in _ABSENT:
                    self._demand(status, name)

    def remove_beneath(self, name: str) -> None:
        pattern = "".join(f"[{letter}]" if letter in ".+" else letter for letter in name)
        status = self._store.remove_by_regex(f"^{pattern}/.*", True)
        self._demand(status, name)

    def _registered(self, memory: np.ndarray, transfer: Any) -> Any:
        """Register the memory for the length of a transfer; on TCP that costs microseconds."""
        pointer, size = _memory(memory)
        self._demand(self._store.register_buffer(pointer, size), "this client's memory")
        try:
            return transfer()
        finally:
            self._store.unregister_buffer(pointer)

    def _demand(self, status: int, name: str) -> None:
        if status < 0:
            raise WeightStoreUnavailable(
                f"the Mooncake store of {self.settings.master} (stores.weights) does not answer for {name}: "
                f"status {status}; is its master or store process gone?"
            )


_clients: dict[MooncakeSettings, MooncakeClient] = {}
_clients_lock = threading.Lock()


def shared_client(settings: MooncakeSettings) -> MooncakeClient:
    """The process's client of these settings."""
    with _clients_lock:
        if settings not in _clients:
            _clients[settings] = MooncakeClient(settings)
        return _clients[settings]


def _package() -> Any:
    for name, value in {**TCP_DEFAULTS, **_SETUP, **_QUIET}.items():
        os.environ.setdefault(name, value)
    try:
        import mooncake.store
    except ImportError as error:
        raise WeightStoreUnavailable(
            f"stores.weights names a Mooncake store, whose client cannot be loaded ({error}): pip install "
            "mooncake-transfer-engine-non-cuda, and Debian's libibverbs1, librdmacm1 and libnuma1"
        ) from None
    return mooncake.store


def _require_listener(settings: MooncakeSettings) -> None:
    """The package itself tries for a hundred seconds to reach a master."""
    host, _, port = settings.master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=settings.connect_limit_s).close()
    except OSError as error:
        raise WeightStoreUnavailable(
            f"no Mooncake master listens on {settings.master} ({error}): start one "
            "(python -m infra.cluster or infra.mooncake), or change stores.weights"
        ) from None


def _memory(array: np.ndarray) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes
