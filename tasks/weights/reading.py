"""Pieces of a published version from the store, verified: in full, or as deltas on what is held.

Buckets are fetched by a few threads, so that one is verified while the next is on its way.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from blocks.weight_store import WeightStore
from infra.object_store import Data, MissingObject
from tasks.weights import delta
from tasks.weights.manifest import (
    BucketEntry,
    CorruptWeights,
    MismatchedWeights,
    MissingWeights,
    PieceEntry,
    Publication,
    TruncatedWeights,
    checksum,
    read_publication,
)

PieceKey = tuple[str, int]  # a tensor's name and the index of its piece
Pieces = dict[PieceKey, np.ndarray]  # contents, uint8 of shape (size,), each writable and not shared
_FETCHES = 3
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class _Located:
    bucket: int
    offset: int
    size: int
    key: PieceKey

    @property
    def end(self) -> int:
        return self.offset + self.size


def chain_to(
    store: WeightStore, publication: Publication, held: Publication | None = None
) -> list[Publication]:
    """Publications to apply in this order: the held one's successor or a snapshot first, this one last.

    Raises `MissingWeights` when a version in between is gone or was published again.
    """
    chain = [publication]
    while not _starts(chain[-1], held):
        base = chain[-1].base
        assert base is not None  # `Publication.require_sound`
        found = read_publication(store, base.version)
        if found.incarnation != base.incarnation:
            raise MissingWeights(
                f"version {chain[-1].version} is a delta on a publication of version {base.version} that "
                "was replaced: publish it again"
            )
        chain.append(found)
    return chain[::-1]


def applies_to(publication: Publication, held: Publication | None) -> bool:
    """Whether the version's deltas apply to what is held."""
    base = publication.base
    return (
        base is not None
        and held is not None
        and (base.version, base.incarnation) == (held.version, held.incarnation)
    )


def _starts(publication: Publication, held: Publication | None) -> bool:
    return publication.depth == 0 or applies_to(publication, held)


def all_pieces(publication: Publication) -> list[PieceKey]:
    return [
        (name, index) for name, entry in publication.tensors.items() for index in range(len(entry.pieces))
    ]


def read_pieces(
    store: WeightStore, publication: Publication, wanted: Sequence[PieceKey] | None = None
) -> Pieces:
    """The contents of these pieces, or of all, from the newest snapshot and the deltas since.

    With `wanted`, only their bytes are fetched. Raises `WeightsError`.
    """
    snapshot, *deltas = chain_to(store, publication)
    pieces = read_snapshot(store, snapshot, wanted)
    for following in deltas:
        apply_deltas(store, following, pieces, wanted)
    return pieces


def read_snapshot(store: WeightStore, snapshot: Publication, wanted: Sequence[PieceKey] | None) -> Pieces:
    """From the buckets in full. A wanted piece that the snapshot has not is left out."""
    places: list[_Located] = []
    for key in all_pieces(snapshot) if wanted is None else wanted:
        piece = _piece(snapshot, key)
        if piece is None:
            continue
        if piece.full is None:
            raise CorruptWeights(f"version {snapshot.version}: the manifest does not say where {key[0]} lies")
        places.append(_Located(piece.full.bucket, piece.full.offset, piece.size, key))
    pieces: Pieces = {}
    for key, data in _fetch(store, snapshot, snapshot.buckets, places, whole=wanted is None):
        pieces[key] = data
    _require(snapshot, pieces, lambda: _is_current(store, snapshot))
    return pieces


def apply_deltas(
    store: WeightStore, publication: Publication, pieces: Pieces, wanted: Sequence[PieceKey] | None = None
) -> None:
    """Turn the base's pieces into this version's, in place; on any error they are as they were.

    Pieces that the version no longer has are removed, and new ones added. Raises `WeightsError`.
    """
    places: list[_Located] = []
    for key in all_pieces(publication) if wanted is None else wanted:
        piece = _piece(publication, key)
        if piece is None:
            continue
        if piece.delta is None:
            raise CorruptWeights(f"version {publication.version}: the manifest has no delta of {key[0]}")
        if piece.delta.encoding == "same":
            if key not in pieces or len(pieces[key]) != piece.size:
                raise CorruptWeights(f"version {publication.version}: {key[0]} is not in its base")
            continue
        places.append(_Located(piece.delta.bucket, piece.delta.offset, piece.delta.size, key))
    fresh: Pieces = {}
    applied: list[tuple[PieceKey, bytes]] = []
    try:
        for key, data in _fetch(store, publication, publication.delta_buckets, places, whole=wanted is None):
            payload = data.tobytes()
            piece = _piece(publication, key)
            assert piece is not None
            assert piece.delta is not None
            itemsize = publication.tensors[key[0]].torch_dtype.itemsize
            if piece.delta.encoding == "raw":
                target = fresh[key] = np.empty(piece.size, np.uint8)
            elif key in pieces and len(pieces[key]) == piece.size:
                target = pieces[key]
                applied.append((key, payload))
            else:
                raise CorruptWeights(f"version {publication.version}: {key[0]} is not in its base")
            delta.apply(piece.delta.encoding, payload, target, itemsize)
            _require(publication, {key: target}, lambda: _is_current(store, publication))
    except BaseException:
        for key, payload in reversed(applied):
            _undo(publication, key, payload, pieces[key])
        raise
    pieces.update(fresh)
    present = set(all_pieces(publication))
    for key in [key for key in pieces if key not in present]:
        del pieces[key]


def _undo(publication: Publication, key: PieceKey, payload: bytes, content: np.ndarray) -> None:
    piece = _piece(publication, key)
    assert piece is not None
    assert piece.delta is not None
    try:
        itemsize = publication.tensors[key[0]].torch_dtype.itemsize
        delta.apply(piece.delta.encoding, payload, content, itemsize)
    except CorruptWeights:
        pass  # it raised in the same way the first time, before it changed anything


def _piece(publication: Publication, key: PieceKey) -> PieceEntry | None:
    entry = publication.tensors.get(key[0])
    return entry.pieces[key[1]] if entry is not None and key[1] < len(entry.pieces) else None


def _fetch(
    store: WeightStore,
    publication: Publication,
    buckets: Sequence[BucketEntry],
    places: Sequence[_Located],
    *,
    whole: bool,
) -> Iterator[tuple[PieceKey, np.ndarray]]:
    """(key, bytes) of each place, by whole buckets or by ranges of them."""
    version = publication.version
    by_bucket: dict[int, list[_Located]] = {}
    for place in places:
        by_bucket.setdefault(place.bucket, []).append(place)
    work: list[tuple[BucketEntry, list[_Located]]] = []
    for index, inside in by_bucket.items():
        if index >= len(buckets) or any(place.end > buckets[index].size for place in inside):
            raise CorruptWeights(f"version {version}: the manifest names bytes that there are not")
        work.append((buckets[index], sorted(inside, key=lambda place: place.offset)))

    def fetch(job: tuple[BucketEntry, list[_Located]]) -> list[tuple[PieceKey, np.ndarray]]:
        bucket, inside = job
        found: Sequence[Data]
        if whole:
            runs, wanted = [inside], [(0, bucket.size)]
            found = store.get_buckets(version, [bucket.name])
        else:
            runs = _runs(inside)
            wanted = [(run[0].offset, run[-1].end - run[0].offset) for run in runs]
            found = store.get_ranges(version, [(bucket.name, start, size) for start, size in wanted])
        contents = []
        for run, (start, size), data in zip(runs, wanted, found, strict=True):
            if len(data) != size:
                raise TruncatedWeights(
                    f"version {version}: bucket {bucket.name} has {len(data)} bytes, not {size}"
                )
            contents += [(place.key, _own(data, place.offset - start, place.size)) for place in run]
        return contents

    try:
        for contents in overlapped(fetch, work):
            yield from contents
    except MissingObject as error:
        raise MissingWeights(f"version {version}: {error}") from None
    except ValueError as error:
        raise CorruptWeights(f"version {version}: {error}") from None


def _runs(places: Sequence[_Located]) -> list[list[_Located]]:
    """Places that follow one another without a gap, together."""
    runs: list[list[_Located]] = []
    for place in places:
        if runs and runs[-1][-1].end == place.offset:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def _own(data: Data, offset: int, size: int) -> np.ndarray:
    """Writable bytes: of the bucket's own memory where that is writable, which nothing else uses."""
    found = np.frombuffer(data, np.uint8, size, offset) if size else np.empty(0, np.uint8)
    return found if found.flags.writeable else found.copy()


def overlapped(call: Callable[[_T], _R], work: Iterable[_T], threads: int = _FETCHES) -> Iterator[_R]:
    """Results in order; never more than `threads` calls are ahead of the one consumed."""
    remaining = iter(work)
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        running: list[Future[_R]] = [pool.submit(call, one) for one in islice(remaining, threads)]
        try:
            while running:
                result = running.pop(0).result()
                running.extend(pool.submit(call, one) for one in islice(remaining, 1))
                yield result
        finally:
            for future in running:
                future.cancel()


def _is_current(store: WeightStore, publication: Publication) -> bool:
    try:
        return read_publication(store, publication.version).incarnation == publication.incarnation
    except MissingWeights:
        return False


def _require(publication: Publication, pieces: Mapping[PieceKey, np.ndarray], current: Any) -> None:
    """Raise unless these contents are what the manifest says."""
    for key, content in pieces.items():
        name, index = key
        entry, piece = publication.tensors[name], publication.tensors[name].pieces[index]
        if len(content) != piece.size or _expected_size(entry, index) != piece.size:
            raise MismatchedWeights(
                f"version {publication.version}: {name} has {len(content)} bytes, which is not "
                f"{entry.dtype} {list(entry.shape)}"
            )
        if checksum(content) != piece.checksum:
            if not current():
                raise MissingWeights(
                    f"version {publication.version} was withdrawn or replaced while it was read"
                )
            buckets = publication.buckets if piece.delta is None or piece.full else publication.delta_buckets
            place = piece.full or piece.delta
            bucket = buckets[place.bucket].name if place is not None else "none"
            raise CorruptWeights(
                f"version {publication.version}: {name} has another checksum (bucket {bucket})"
            )


def _expected_size(entry: Any, index: int) -> int:
    size: int = entry.torch_dtype.itemsize
    for length in entry.piece_shape(index):
        size *= length
    return size
