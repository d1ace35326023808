"""Publishing: pieces are copied to the host, checksummed, compressed and sent by a few threads."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import BoundedSemaphore
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blocks.weight_store import WeightStore
from tasks.weights import delta
from tasks.weights.buckets import (
    Piece,
    copy_to_host,
    cut,
    grouped,
    pack,
    pack_payloads,
    piece_checksums,
    tensor_of,
)
from tasks.weights.config import PublicationConfig
from tasks.weights.manifest import (
    BaseEntry,
    BucketEntry,
    DeltaPlace,
    PieceEntry,
    Place,
    Publication,
    TensorEntry,
    WeightsError,
    checksum,
    dtype_name,
    read_publication,
)
from tasks.weights.reading import PieceKey, Pieces, overlapped, read_pieces


@dataclass(frozen=True, slots=True)
class _Held:
    """The version that the next delta is based on, and its contents."""

    publication: Publication
    pieces: Pieces


class Publisher:
    """Publishes a trainer's versions one after another. One thread at a time calls it."""

    def __init__(self, store: WeightStore, config: PublicationConfig | None = None):
        self._store = store
        self._config = config or PublicationConfig()
        self._held: _Held | None = None
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._last: Future[Publication] | None = None

    def publish(
        self, version: int, named_tensors: Iterable[tuple[str, Tensor]], *, durable: bool = False
    ) -> Publication:
        """Write the weights of a version. Until it returns, no reader sees anything of it.

        Holds a few buckets in memory at a time, or with `config.delta` all weights once in published dtype
        beside those of the version before. The tensors may be on any device and may share memory; they must
        not change until this returns. With `durable` a version in a local store survives a power cut. Raises
        `WeightsError` on no tensors, a name given twice or a dtype that safetensors does not have.
        """
        return self._start(version, named_tensors, durable, in_flight=self._config.threads + 1).result()

    def push(
        self, version: int, named_tensors: Iterable[tuple[str, Tensor]], *, durable: bool = False
    ) -> Future[Publication]:
        """As `publish`, but return once all tensors are copied: the next train step may change them.

        The rest goes on beside it. The future has the publication, or what went wrong. Holds all weights
        once in host memory until then. A push waits for the one before.
        """
        return self._start(version, named_tensors, durable, in_flight=None)

    def close(self) -> None:
        """Wait for what is being pushed."""
        self._sender.shutdown(wait=True)

    def _start(
        self, version: int, named: Iterable[tuple[str, Tensor]], durable: bool, in_flight: int | None
    ) -> Future[Publication]:
        if self._last is not None:
            self._last.exception()
        config = self._config
        dtype = None if config.dtype is None else getattr(torch, config.dtype)
        run = _Run(self._store, version, config, durable)
        pieces = cut(named, dtype, config.shards)
        try:
            if config.delta:
                copies = [(_without_source(piece), copy_to_host(piece)) for piece in pieces]
                held, self._held = self._held, None
                self._last = self._sender.submit(self._send_changes, run, copies, held)
            else:
                full = run.copy_and_send(pieces, in_flight)
                self._last = self._sender.submit(run.finish, full)
        except BaseException as error:
            run.close()
            if isinstance(error, WeightsError):
                raise type(error)(f"version {version}: {error}") from None
            raise
        return self._last

    def _send_changes(
        self, run: "_Run", copies: list[tuple[Piece, np.ndarray]], held: _Held | None
    ) -> Publication:
        """On the sender's thread, with every piece in host memory."""
        try:
            previous = run.previous()
            base = self._base(previous, held)
            deltas = None
            if base is not None:
                deltas = run.send_deltas(copies, base.pieces)
                if sum(bucket.size for bucket in deltas.buckets) > 0.9 * sum(len(c) for _, c in copies):
                    deltas, base = None, None
            depth = 0 if base is None else base.publication.depth + 1
            full = None
            if depth == 0 or depth >= self._config.snapshot_every:
                depth = 0
                full = run.copy_and_send(
                    (_at_host(piece, content) for piece, content in copies), self._config.threads + 1
                )
            publication = run.finish(
                full, deltas, base.publication if base is not None else None, depth, copies
            )
            self._held = _Held(publication, {(piece.name, piece.index): content for piece, content in copies})
            return publication
        finally:
            run.close()

    def _base(self, previous: Publication | None, held: _Held | None) -> _Held | None:
        if previous is None or not previous.delta_follows:
            return None
        if held is not None and held.publication.incarnation == previous.incarnation:
            return held
        try:
            return _Held(previous, read_pieces(self._store, previous))
        except WeightsError:
            return None  # a version that nobody can read is no base


@dataclass(frozen=True, slots=True)
class _Sent:
    """One series of buckets, and where in it each piece lies."""

    buckets: list[BucketEntry]
    places: dict[PieceKey, Any]
    checksums: dict[PieceKey, str]


class _Run:
    """The threads and names of one publication."""

    def __init__(self, store: WeightStore, version: int, config: PublicationConfig, durable: bool):
        self._store = store
        self._version = version
        self._config = config
        self._durable = durable
        self._incarnation = secrets.token_hex(8)
        self._tensors: dict[str, list[Piece]] = {}
        self._pool = ThreadPoolExecutor(config.threads, thread_name_prefix="publication")

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def previous(self) -> Publication | None:
        newest = self._store.newest_below(self._version)
        return read_publication(self._store, newest) if newest is not None else None

    def copy_and_send(self, pieces: Iterable[Piece], in_flight: int | None) -> Callable[[], _Sent]:
        """Pack buckets on this thread while others send; the result waits for the last one."""
        slots = BoundedSemaphore(in_flight) if in_flight is not None else None
        sending: list[tuple[list[Piece], list[int], Future[tuple[BucketEntry, list[str]]]]] = []
        for group in grouped(pieces, self._config.bucket_bytes):
            if slots is not None:
                slots.acquire()
            data, offsets = pack(group)
            for piece in group:
                self._tensors.setdefault(piece.name, []).append(piece)
            future = self._pool.submit(self._send, len(sending), data, group, offsets, "")
            if slots is not None:
                future.add_done_callback(lambda _, slots=slots: slots.release())  # type: ignore[misc]
            # The trainer's tensors are not held until the end of a push.
            sending.append(([_without_source(piece) for piece in group], offsets, future))
            del data, group
        for name, of_tensor in self._tensors.items():
            self._tensors[name] = [_without_source(piece) for piece in of_tensor]

        def wait() -> _Sent:
            sent = _Sent([], {}, {})
            for number, (group, offsets, future) in enumerate(sending):
                bucket, checksums = future.result()
                sent.buckets.append(bucket)
                for piece, offset, found in zip(group, offsets, checksums, strict=True):
                    sent.places[piece.name, piece.index] = Place(bucket=number, offset=offset)
                    sent.checksums[piece.name, piece.index] = found
            return sent

        return wait

    def send_deltas(self, copies: Sequence[tuple[Piece, np.ndarray]], base: Pieces) -> _Sent:
        """Encode on several threads; send each bucket as soon as it is full."""

        def encode(one: tuple[Piece, np.ndarray]) -> tuple[Piece, str, delta.Encoding, bytes]:
            piece, content = one
            before = base.get((piece.name, piece.index))
            if before is None or len(before) != len(content):
                return piece, checksum(content), "raw", content.tobytes()
            encoding, payload = delta.encode(before, content, piece.dtype.itemsize)
            return piece, checksum(content), encoding, payload

        sent = _Sent([], {}, {})
        waiting: list[tuple[Piece, delta.Encoding, bytes]] = []
        sending: list[Future[tuple[BucketEntry, list[str]]]] = []

        def send() -> None:
            data, offsets = pack_payloads([(piece.label, payload) for piece, _, payload in waiting])
            for (piece, encoding, payload), offset in zip(waiting, offsets, strict=True):
                place = DeltaPlace(bucket=len(sending), offset=offset, encoding=encoding, size=len(payload))
                sent.places[piece.name, piece.index] = place
            sending.append(self._pool.submit(self._send, len(sending), data, (), (), "d"))
            waiting.clear()

        for piece, found, encoding, payload in overlapped(encode, copies, self._config.threads):
            sent.checksums[piece.name, piece.index] = found
            if encoding == "same":
                place = DeltaPlace(bucket=0, offset=0, encoding="same", size=0)
                sent.places[piece.name, piece.index] = place
                continue
            if waiting and sum(len(p) for _, _, p in waiting) + len(payload) > self._config.bucket_bytes:
                send()
            waiting.append((piece, encoding, payload))
        if waiting:
            send()
        sent.buckets.extend(future.result()[0] for future in sending)
        return sent

    def finish(
        self,
        full: Callable[[], _Sent] | None,
        deltas: _Sent | None = None,
        base: Publication | None = None,
        depth: int = 0,
        copies: Sequence[tuple[Piece, np.ndarray]] = (),
    ) -> Publication:
        """Wait for the buckets and write the manifest."""
        try:
            sent = full() if full is not None else _Sent([], {}, {})
            for piece, _ in copies if full is None else ():
                self._tensors.setdefault(piece.name, []).append(piece)
            changes = deltas or _Sent([], {}, {})
            tensors = {name: _entry(pieces, sent, changes) for name, pieces in self._tensors.items()}
            if not tensors:
                raise WeightsError(f"version {self._version}: there are no tensors to publish")
            previous = self.previous()
            changed = _changed(tensors, {} if previous is None else previous.tensors)
            publication = Publication(
                version=self._version,
                incarnation=self._incarnation,
                buckets=tuple(sent.buckets),
                delta_buckets=tuple(deltas.buckets) if deltas is not None else (),
                tensors=tensors,
                base=BaseEntry(version=base.version, incarnation=base.incarnation) if base else None,
                depth=depth,
                delta_follows=self._config.delta,
                compared_with=None if previous is None else previous.version,
                changed=changed,
                unchanged=changed == 0,
            ).seal()
            self._store.put_manifest(
                self._version, publication.model_dump_json().encode(), durable=self._durable
            )
            return publication
        finally:
            self.close()

    def _send(
        self, number: int, data: np.ndarray, pieces: Sequence[Piece], offsets: Sequence[int], kind: str
    ) -> tuple[BucketEntry, list[str]]:
        checksums = piece_checksums(data, pieces, offsets)
        name = self._store.put_bucket(
            self._version, self._incarnation, number, data.data, kind=kind, durable=self._durable
        )
        return BucketEntry(name=name, size=len(data)), checksums


def _entry(pieces: Sequence[Piece], full: _Sent, deltas: _Sent) -> TensorEntry:
    first = pieces[0]
    return TensorEntry(
        shape=first.tensor_shape,
        dtype=dtype_name(first.dtype),
        split=first.split,
        pieces=tuple(
            PieceEntry(
                size=piece.size,
                checksum=(full.checksums or deltas.checksums)[piece.name, piece.index],
                full=full.places.get((piece.name, piece.index)),
                delta=deltas.places.get((piece.name, piece.index)),
            )
            for piece in pieces
        ),
    )


def _changed(tensors: dict[str, TensorEntry], before: dict[str, TensorEntry]) -> int:
    """Tensors that are new, gone, or of other content, shape or dtype than before."""

    def content(entry: TensorEntry | None) -> object:
        return entry and entry.content

    return sum(
        content(tensors.get(name)) != content(before.get(name)) for name in tensors.keys() | before.keys()
    )


def _at_host(piece: Piece, content: np.ndarray) -> Piece:
    source = tensor_of(content, piece.dtype, tuple(piece.source.shape))
    return Piece(piece.name, piece.index, piece.count, piece.split, piece.tensor_shape, source, piece.dtype)


def _without_source(piece: Piece) -> Piece:
    source = torch.empty(piece.source.shape, device="meta")
    return Piece(piece.name, piece.index, piece.count, piece.split, piece.tensor_shape, source, piece.dtype)
