"""Weight publication as a transaction: buckets of safetensors, then a manifest, written last.

A version is published when its manifest is there, and then it is there whole: names, shapes, dtypes and
checksums say what a reader must find. A version may be published again (a resumed trainer repeats its last
step): the new buckets lie under an incarnation of their own, and replacing the manifest swaps them in.

This module is what trainers and engines call. A trainer that publishes more than once holds a `Publisher`,
an engine that loads more than once a `WeightReceiver`.
"""

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from blocks.weight_store import WeightStore
from tasks.weights.assembly import assemble, pieces_of_plan
from tasks.weights.config import PublicationConfig
from tasks.weights.manifest import (
    CorruptWeights,
    MismatchedWeights,
    MissingWeights,
    Publication,
    TruncatedWeights,
    WeightsError,
    dtype_name,
    read_publication,
)
from tasks.weights.publisher import Publisher
from tasks.weights.reading import read_pieces
from tasks.weights.receiver import WeightReceiver
from tasks.weights.sharding import Plan, Slice, tensor_parallel_plan

__all__ = [
    "CorruptWeights",
    "MismatchedWeights",
    "MissingWeights",
    "Plan",
    "Publication",
    "Publisher",
    "Slice",
    "TruncatedWeights",
    "WeightReceiver",
    "WeightsError",
    "collect",
    "load",
    "load_shard",
    "publish",
    "read_publication",
    "require_match",
    "tensor_parallel_plan",
]


def publish(
    store: WeightStore,
    version: int,
    named_tensors: Iterable[tuple[str, Tensor]],
    config: PublicationConfig | None = None,
    *,
    durable: bool = False,
) -> Publication:
    """`Publisher.publish` once. With `config.delta` the version before is read back from the store."""
    publisher = Publisher(store, config)
    try:
        return publisher.publish(version, named_tensors, durable=durable)
    finally:
        publisher.close()


def load(store: WeightStore, version: int) -> dict[str, Tensor]:
    """The weights of a version, on the CPU, checked against its manifest in every respect.

    Raises `MissingWeights`, `TruncatedWeights`, `CorruptWeights` or `MismatchedWeights`.
    """
    publication = read_publication(store, version)
    pieces = read_pieces(store, publication)
    return {name: assemble(publication, name, pieces) for name in publication.tensors}


def load_shard(store: WeightStore, version: int, plan: Plan) -> dict[str, Tensor]:
    """The slices of a version that a plan names (`tensor_parallel_plan`), on the CPU, verified.

    Only the bytes of the pieces that the slices touch are fetched: with `weights.shards` a multiple of the
    workers, no more than the slices. Raises as `load`, and `MismatchedWeights` for a plan that does not fit.
    """
    publication = read_publication(store, version)
    wanted = pieces_of_plan(publication, plan)
    pieces = read_pieces(store, publication, wanted)
    return {name: assemble(publication, name, pieces, part) for name, part in plan.items()}


def require_match(publication: Publication, expected: Mapping[str, torch.Tensor]) -> None:
    """Raise `MismatchedWeights` unless the version has these names, shapes and dtypes, no fewer or more.

    Called with a model's state dict, it says before anything is copied whether the version fits the model.
    """
    missing = sorted(expected.keys() - publication.tensors.keys())
    unmatched = sorted(publication.tensors.keys() - expected.keys())
    different = [
        f"{name} is {entry.dtype} {list(entry.shape)}, not {dtype_name(tensor.dtype)} {list(tensor.shape)}"
        for name, tensor in expected.items()
        if (entry := publication.tensors.get(name)) is not None
        and (entry.shape != tuple(tensor.shape) or entry.dtype != dtype_name(tensor.dtype))
    ]
    faults = [
        *([f"missing: {_few(missing)}"] if missing else []),
        *([f"unmatched: {_few(unmatched)}"] if unmatched else []),
        *([f"different: {_few(different)}"] if different else []),
    ]
    if faults:
        raise MismatchedWeights(f"version {publication.version} does not fit: " + "; ".join(faults))


def collect(store: WeightStore, keep: Collection[int]) -> list[int]:
    """Remove every version that is not needed, and what unfinished or replaced incarnations left.

    Needed are those of `keep`, and the versions that their deltas are based on. `keep` must name the version
    that is being published now, if one is: its base stays too. Returns the versions removed, ascending.
    """
    published = store.versions()
    needed = set(keep)
    pending = [version for version in published if version in needed]
    under_way = max((version for version in needed if version not in published), default=None)
    if under_way is not None:
        older = [version for version in published if version < under_way]
        if older and read_publication(store, older[-1]).delta_follows:
            pending.append(older[-1])
    needed.update(pending)
    incarnations = {}
    while pending:
        publication = read_publication(store, pending.pop())
        incarnations[publication.version] = publication.incarnation
        base = publication.base
        if publication.depth > 0 and base is not None and base.version not in needed:
            needed.add(base.version)
            if base.version in published:
                pending.append(base.version)
    removed = []
    for version in store.folders():
        if version not in needed:
            store.delete(version)
            removed.append(version)
    for version, live in incarnations.items():
        for incarnation in store.incarnations(version):
            if incarnation != live:
                store.delete_incarnation(version, incarnation)
    return sorted(removed)


def _few(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
