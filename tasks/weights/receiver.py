"""An engine's end of the weight store: it pulls what it does not hold."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from blocks.weight_store import WeightStore
from tasks.weights.assembly import assemble, pieces_of_plan
from tasks.weights.manifest import Publication, read_publication
from tasks.weights.reading import (
    PieceKey,
    Pieces,
    all_pieces,
    applies_to,
    apply_deltas,
    chain_to,
    read_snapshot,
)
from tasks.weights.sharding import Plan


@dataclass(frozen=True, slots=True)
class Pull:
    """What the last load fetched."""

    kind: Literal["held", "delta", "snapshot"]  # nothing, a delta on what was held, or all from a snapshot on
    size: int  # bytes of the pieces fetched
    versions: tuple[int, ...]  # versions read, in the order applied


class WeightReceiver:
    """Loads versions one after another. One thread at a time calls it.

    Where the publisher makes deltas, it holds one copy of its weights in published dtype on the host and
    pulls only what changed; without deltas it holds nothing. `plan_of` gives the slices of a tensor-parallel
    worker, as `lambda publication: tensor_parallel_plan(publication, rank, size)`; without it, whole tensors.
    """

    def __init__(self, store: WeightStore, plan_of: Callable[[Publication], Plan] | None = None):
        self._store = store
        self._plan_of = plan_of
        self._held: tuple[Publication, Pieces] | None = None
        self._given: Publication | None = None  # what the engine has
        self.last: Pull | None = None

    @property
    def version(self) -> int | None:
        """The version that the engine has; None before the first."""
        return self._given.version if self._given is not None else None

    def forget(self) -> None:
        """The engine no longer has the weights loaded last: the next load yields every tensor."""
        self._given = None

    def load(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors that differ from those loaded last, whole, by name; all of them the first time.

        Everything is verified before this returns: on a `WeightsError` the engine keeps what it has. The
        tensors are on the CPU and views of the receiver's memory: copy them before the next load, and let no
        engine change them. An engine that fails while it copies calls `forget`.
        """
        publication = read_publication(self._store, version)
        plan = self._plan_of(publication) if self._plan_of is not None else None
        wanted = pieces_of_plan(publication, plan) if plan is not None else None
        pieces = self._pull(publication, wanted)
        names = list(plan if plan is not None else publication.tensors)
        if self._given is not None:
            names = [name for name in names if not _same(publication, self._given, name)]
        self._given = publication
        if not publication.delta_follows:
            self._held = None
        parts = plan or {}
        return ((name, assemble(publication, name, pieces, parts.get(name))) for name in names)

    def load_whole(self, version: int) -> dict[str, Tensor]:
        """Every tensor of a version, in memory that no later load touches; only what changed is pulled.

        Raises as `load` does.
        """
        self.forget()
        tensors = self.load(version)
        if self._held is None:
            return dict(tensors)
        return {name: tensor.clone() for name, tensor in tensors}

    def _pull(self, publication: Publication, wanted: list[PieceKey] | None) -> Pieces:
        held = self._held[0] if self._held is not None else None
        if self._held is not None and self._held[0].incarnation == publication.incarnation:
            self.last = Pull("held", 0, ())
            return self._held[1]
        chain = chain_to(self._store, publication, held)
        snapshot: Publication | None = None
        if self._held is not None and applies_to(chain[0], held):
            pieces, deltas = self._held[1], chain
        else:
            snapshot, *deltas = chain
            self._held = None  # not two copies at a time
            pieces = read_snapshot(self._store, snapshot, wanted)
            self._held = snapshot, pieces
        for following in deltas:
            apply_deltas(self._store, following, pieces, wanted)
            self._held = following, pieces
        size = sum(_delta_size(one, wanted) for one in deltas)
        if snapshot is not None:
            size += _full_size(snapshot, wanted)
        kind: Literal["delta", "snapshot"] = "delta" if snapshot is None else "snapshot"
        self.last = Pull(kind, size, tuple(one.version for one in chain))
        return pieces


def _same(publication: Publication, given: Publication, name: str) -> bool:
    before = given.tensors.get(name)
    return before is not None and before.content == publication.tensors[name].content


def _full_size(publication: Publication, wanted: list[PieceKey] | None) -> int:
    keys = set(wanted) if wanted is not None else set(all_pieces(publication))
    return sum(
        piece.size
        for name, entry in publication.tensors.items()
        for index, piece in enumerate(entry.pieces)
        if (name, index) in keys
    )


def _delta_size(publication: Publication, wanted: list[PieceKey] | None) -> int:
    keys = set(wanted) if wanted is not None else set(all_pieces(publication))
    return sum(
        piece.delta.size
        for name, entry in publication.tensors.items()
        for index, piece in enumerate(entry.pieces)
        if piece.delta is not None and (name, index) in keys
    )
