"""One trainer at a time: a lease on a run, kept in its store, with the epoch as the fencing token.

    lease/00000002.json               who holds epoch 2; created conditionally, so an epoch has one holder
    lease/heartbeats/00000002.json    the sign of life that this holder renews

`Claim` decides, from what is seen, whether to take over, wait or give up; `TrainerLease` does it. A takeover
is safe even when the old holder lives: the higher epoch makes its next `check` fail. So a wrong guess about
life and death costs a run its trainer, never its consistency.
"""

import asyncio
import logging
import os
import re
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from infra.blocking_calls import in_daemon_thread
from infra.clock import wall
from infra.object_store import MissingObject, ObjectStore

logger = logging.getLogger(__name__)

_EPOCH = re.compile(r"lease/(\d{8,})\.json")
_RELEASE_LIMIT_S = 10.0
_SAME_START_S = 2.0  # the system derives a start time from its boot time, which clock corrections shift


class LeaseRefused(RuntimeError):
    """Another trainer holds this run and lives; the message says where."""


class LeaseLost(RuntimeError):
    """Another trainer has taken this run over: stop, and write nothing more."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Holder(_Record):
    """A process, told from any other, also from a later one with the same pid."""

    host: str
    pid: int
    started: float  # seconds, as the host's system tells it


class EpochRecord(_Record):
    epoch: int
    holder: Holder
    claim: str  # unique to one attempt to create this record
    ttl_s: float  # the holder renews its heartbeat three times in this time
    acquired_at: float  # wall clock of the holder


class Heartbeat(_Record):
    count: int
    at: float  # wall clock of the holder
    released: bool = False


class Liveness(StrEnum):
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"  # on another host


@dataclass(frozen=True, slots=True)
class Standing:
    """The newest epoch, as a claimant sees it."""

    record: EpochRecord
    heartbeat: Heartbeat | None  # None before the holder's first
    liveness: Liveness


@dataclass(frozen=True, slots=True)
class Acquire:
    epoch: int


@dataclass(frozen=True, slots=True)
class Wait:
    seconds: float


@dataclass(frozen=True, slots=True)
class Refuse:
    message: str


Decision = Acquire | Wait | Refuse


class Claim:
    """The decisions of one claimant. Pure: it remembers what it has seen, and when, and is told the time."""

    def __init__(self) -> None:
        self._first_seen: tuple[int, int, float] | None = None  # epoch, heartbeat count, when

    def decide(self, standing: Standing | None, now: float) -> Decision:
        """Whether to take the next epoch, to look again after some seconds, or to give up.

        A holder that released the lease, or whose process is known to be dead, is followed at once; one
        that is known to be alive and renews its heartbeat is respected. Where life cannot be told, the
        holder has lost the lease when its heartbeat is older than its ttl, or has not moved while this
        claimant watched for a ttl (which needs no agreement between the clocks of two hosts).
        """
        if standing is None:
            return Acquire(1)
        record, heartbeat = standing.record, standing.heartbeat
        take_over = Acquire(record.epoch + 1)
        if standing.liveness is Liveness.DEAD or (heartbeat is not None and heartbeat.released):
            return take_over
        count, renewed_at = (heartbeat.count, heartbeat.at) if heartbeat else (0, record.acquired_at)
        if self._first_seen is None or self._first_seen[0] != record.epoch:
            self._first_seen = (record.epoch, count, now)
        _, first_count, first_seen_at = self._first_seen
        holder = f"process {record.holder.pid} on {record.holder.host}"
        if count != first_count:
            return Refuse(f"{holder} trains this run and lives: stop it first, or give this run another name")
        expires_at = min(renewed_at, first_seen_at) + record.ttl_s
        if now >= expires_at:
            return take_over
        if standing.liveness is Liveness.ALIVE:
            return Refuse(f"{holder} trains this run: stop it first, or give this run another name")
        return Wait(expires_at - now)


def this_process() -> Holder:
    return Holder(host=_host(), pid=os.getpid(), started=psutil.Process().create_time())


def probe(holder: Holder) -> Liveness:
    """Whether a holder's process runs, as far as this host can tell."""
    if holder.host != _host():
        return Liveness.UNKNOWN
    try:
        process = psutil.Process(holder.pid)
        alive = (
            process.status() != psutil.STATUS_ZOMBIE
            and abs(process.create_time() - holder.started) < _SAME_START_S
        )
    except psutil.NoSuchProcess:
        alive = False
    return Liveness.ALIVE if alive else Liveness.DEAD


def _host() -> str:
    """The host's name and its process namespace: a pid means something only within both."""
    namespace = Path("/proc/self/ns/pid")
    suffix = f"/{os.readlink(namespace)}" if namespace.is_symlink() else ""
    return f"{socket.gethostname()}{suffix}"


class TrainerLease:
    """A held lease. `keep` renews it; `check` before every effect that a second trainer must not see."""

    def __init__(self, store: ObjectStore, record: EpochRecord, clock: Callable[[], float]):
        self._store = store
        self._record = record
        self._clock = clock
        self._count = 0
        self._released = False
        self._beating = threading.Lock()  # a renewal under way must not overwrite a release

    @classmethod
    async def acquire(
        cls,
        store: ObjectStore,
        clock: Callable[[], float] = wall,
        *,
        ttl_s: float = 30.0,
        holder: Holder | None = None,
    ) -> "TrainerLease":
        """Take the next epoch of the run whose store this is.

        Waits for a holder that may be dead, about one ttl at most. `clock` is compared between processes.
        Raises `LeaseRefused` when the holder lives.
        """
        claim = Claim()
        holder = holder or this_process()
        while True:
            match claim.decide(_standing(store), clock()):
                case Refuse(message):
                    raise LeaseRefused(message)
                case Wait(seconds):
                    await asyncio.sleep(min(seconds, ttl_s / 3))
                case Acquire(epoch):
                    record = EpochRecord(
                        epoch=epoch,
                        holder=holder,
                        claim=secrets.token_hex(8),
                        ttl_s=ttl_s,
                        acquired_at=clock(),
                    )
                    if _create(store, record):
                        lease = cls(store, record, clock)
                        lease.renew()
                        return lease

    @classmethod
    @asynccontextmanager
    async def held(
        cls,
        store: ObjectStore,
        clock: Callable[[], float] = wall,
        *,
        ttl_s: float = 30.0,
        holder: Holder | None = None,
    ) -> AsyncIterator["TrainerLease"]:
        """Hold the lease for a block: acquired, kept while the block runs, released after it.

        Raises as `acquire` does; when the lease is lost, the block is cancelled and `LeaseLost` is raised.
        """
        lease = await cls.acquire(store, clock, ttl_s=ttl_s, holder=holder)
        block = asyncio.current_task()
        assert block is not None
        keeper = asyncio.create_task(lease.keep())
        keeper.add_done_callback(lambda keeper: None if keeper.cancelled() else block.cancel())
        try:
            yield lease
            await asyncio.sleep(0)  # a loss in the block's last moment is told here and not to its caller
        except asyncio.CancelledError:
            if keeper.done() and not keeper.cancelled():
                block.uncancel()
                keeper.result()
            raise
        finally:
            keeper.cancel()
            await lease.released()

    @property
    def epoch(self) -> int:
        return self._record.epoch

    def check(self) -> None:
        """Raises `LeaseLost` when a higher epoch exists. One request to the store."""
        if self._store.exists(_epoch_key(self.epoch + 1)):
            successor = EpochRecord.model_validate_json(self._store.get(_epoch_key(self.epoch + 1)))
            raise LeaseLost(
                f"process {successor.holder.pid} on {successor.holder.host} has taken this run over "
                f"(epoch {successor.epoch} after {self.epoch})"
            )

    def renew(self) -> None:
        """Write a heartbeat. Raises `LeaseLost`."""
        self.check()
        with self._beating:
            if not self._released:
                self._count += 1
                self._beat()

    async def keep(self) -> None:
        """Renew the lease until cancelled. Raises `LeaseLost`; the trainer must then stop.

        A store that cannot be reached is asked again: who takes over meanwhile is found by the next `check`.
        """
        while True:
            await asyncio.sleep(self._record.ttl_s / 3)
            try:
                await in_daemon_thread(self.renew)
            except LeaseLost:
                raise
            except Exception as error:  # whatever the store's client raises
                logger.warning("the lease on %s was not renewed: %s", self._store.url, error)

    def release(self) -> None:
        """Let the next trainer take over at once. Nothing may be written under this lease afterwards.

        Where the store cannot be reached, the lease is left to expire, or to be found without its process.
        """
        with self._beating:
            self._released = True
            try:
                self._beat()
            except Exception as error:  # whatever the store's client raises
                logger.warning("the lease on %s was not released: %s", self._store.url, error)

    async def released(self) -> None:
        """`release`, for which a store that does not answer is waited for some seconds only."""
        try:
            async with asyncio.timeout(_RELEASE_LIMIT_S):
                await asyncio.shield(in_daemon_thread(self.release))
        except TimeoutError:
            logger.warning("the lease on %s was not released: no answer", self._store.url)

    def _beat(self) -> None:
        heartbeat = Heartbeat(count=self._count, at=self._clock(), released=self._released)
        self._store.put(_heartbeat_key(self.epoch), heartbeat.model_dump_json().encode())


def _standing(store: ObjectStore) -> Standing | None:
    epochs = [int(match[1]) for match in map(_EPOCH.fullmatch, store.list("lease")) if match is not None]
    if not epochs:
        return None
    newest = max(epochs)
    record = EpochRecord.model_validate_json(store.get(_epoch_key(newest)))
    try:
        heartbeat = Heartbeat.model_validate_json(store.get(_heartbeat_key(newest)))
    except MissingObject:
        heartbeat = None
    return Standing(record, heartbeat, probe(record.holder))


def _create(store: ObjectStore, record: EpochRecord) -> bool:
    key = _epoch_key(record.epoch)
    if store.create(key, record.model_dump_json().encode(), durable=True):
        return True
    # A store may refuse the retry of a request that it had carried out.
    return EpochRecord.model_validate_json(store.get(key)).claim == record.claim


def _epoch_key(epoch: int) -> str:
    return f"lease/{epoch:08d}.json"


def _heartbeat_key(epoch: int) -> str:
    return f"lease/heartbeats/{epoch:08d}.json"
