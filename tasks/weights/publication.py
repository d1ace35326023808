"""Weight publication as a transaction: buckets of safetensors, then a manifest, written last.

A version is published when its manifest is there, and then it is there whole: names, shapes, dtypes and
checksums say what a reader must find. A version may be published again (a resumed trainer repeats its last
step): the new buckets lie under an incarnation of their own, and replacing the manifest swaps them in.
"""

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import safetensors.torch
import torch
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from blocks.weight_store import WeightStore
from infra.object_store import MissingObject

_BUCKETS_AT_A_TIME = 4


class WeightsError(RuntimeError):
    """A published version cannot be used, or these weights cannot be published."""


class MissingWeights(WeightsError):
    """The version is not published, or a bucket that its manifest names is gone."""


class TruncatedWeights(WeightsError):
    """A bucket is shorter or longer than its manifest says."""


class CorruptWeights(WeightsError):
    """A checksum does not match, or the manifest cannot be read."""


class MismatchedWeights(WeightsError):
    """Names, shapes or dtypes are not those expected."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BucketEntry(_Entry):
    name: str
    size: int  # bytes
    checksum: str  # xxh3-128, hexadecimal


class TensorEntry(_Entry):
    shape: tuple[int, ...]
    dtype: str  # as torch writes it, without `torch.`
    bucket: int
    checksum: str  # xxh3-128 of its bytes


class Publication(_Entry):
    """The manifest of a published policy version."""

    version: int
    incarnation: str
    buckets: tuple[BucketEntry, ...]
    tensors: dict[str, TensorEntry]
    compared_with: int | None  # the newest older version that was published; None when there was none
    changed: int  # tensors that are not, bit for bit, those of that version
    unchanged: bool  # nothing changed since that version: an update that reached no weight

    @property
    def size(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.size for bucket in self.buckets)


def publish(
    store: WeightStore,
    version: int,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int = 64 * 2**20,
    *,
    durable: bool = False,
) -> Publication:
    """Write the weights of a version. Until it returns, no reader sees anything of it.

    Holds one bucket in memory at a time, of at most `bucket_bytes` or one tensor. The tensors may be on any
    device and may share memory; they must not change until this returns. With `durable` a version in a local
    store survives a power cut; without it, what a cut leaves may fail to load, and then says so. Raises
    `WeightsError` on no tensors or a name given twice.
    """
    incarnation = secrets.token_hex(8)
    buckets: list[BucketEntry] = []
    tensors: dict[str, TensorEntry] = {}
    for bucket in _buckets(named_tensors, bucket_bytes):
        for name, tensor in bucket.items():
            if name in tensors:
                raise WeightsError(f"version {version}: the tensor {name} is given twice")
            tensors[name] = TensorEntry(
                shape=tuple(tensor.shape),
                dtype=_dtype(tensor),
                bucket=len(buckets),
                checksum=_checksum(tensor.reshape(-1).view(torch.uint8).numpy()),
            )
        data = safetensors.torch.save(bucket)
        stored = store.put_bucket(version, incarnation, len(buckets), data, durable=durable)
        buckets.append(BucketEntry(name=stored, size=len(data), checksum=_checksum(data)))
    if not tensors:
        raise WeightsError(f"version {version}: there are no tensors to publish")
    previous = _newest_before(store, version)
    changed = _changed(tensors, {} if previous is None else previous.tensors)
    publication = Publication(
        version=version,
        incarnation=incarnation,
        buckets=tuple(buckets),
        tensors=tensors,
        compared_with=None if previous is None else previous.version,
        changed=changed,
        unchanged=changed == 0,
    )
    store.put_manifest(version, publication.model_dump_json().encode(), durable=durable)
    return publication


def read_publication(store: WeightStore, version: int) -> Publication:
    """The manifest of a version. Raises `MissingWeights` or `CorruptWeights`."""
    try:
        data = store.get_manifest(version)
    except MissingObject:
        raise MissingWeights(
            f"version {version} is not published in {store.store.url} (published: {store.versions()})"
        ) from None
    try:
        publication = Publication.model_validate_json(data)
    except ValidationError as error:
        raise CorruptWeights(f"version {version}: the manifest cannot be read: {error}") from None
    if publication.version != version:
        raise CorruptWeights(f"the manifest of version {version} says it is of {publication.version}")
    return publication


def load(store: WeightStore, version: int) -> dict[str, torch.Tensor]:
    """The weights of a version, on the CPU, checked against its manifest in every respect.

    Raises `MissingWeights`, `TruncatedWeights`, `CorruptWeights` or `MismatchedWeights`.
    """
    publication = read_publication(store, version)
    tensors: dict[str, torch.Tensor] = {}
    for bucket in _verified_buckets(store, publication):
        tensors.update(bucket)
    require_match(publication, tensors)
    return tensors


def require_match(publication: Publication, expected: Mapping[str, torch.Tensor]) -> None:
    """Raise `MismatchedWeights` unless the version has these names, shapes and dtypes, no fewer or more.

    Called with a model's state dict, it says before anything is copied whether the version fits the model.
    """
    missing = sorted(expected.keys() - publication.tensors.keys())
    unmatched = sorted(publication.tensors.keys() - expected.keys())
    different = [
        f"{name} is {entry.dtype} {list(entry.shape)}, not {_dtype(tensor)} {list(tensor.shape)}"
        for name, tensor in expected.items()
        if (entry := publication.tensors.get(name)) is not None
        and (entry.shape != tuple(tensor.shape) or entry.dtype != _dtype(tensor))
    ]
    faults = [
        *([f"missing: {_few(missing)}"] if missing else []),
        *([f"unmatched: {_few(unmatched)}"] if unmatched else []),
        *([f"different: {_few(different)}"] if different else []),
    ]
    if faults:
        raise MismatchedWeights(f"version {publication.version} does not fit: " + "; ".join(faults))


def collect(store: WeightStore, keep: Collection[int]) -> list[int]:
    """Remove every version that is not to be kept, and what unfinished or replaced incarnations left.

    `keep` must name the version that is being published now, if one is. Returns the versions removed.
    """
    removed = []
    for version in store.folders():
        if version not in keep:
            store.delete(version)
            removed.append(version)
    for version in store.versions():
        live = read_publication(store, version).incarnation
        for incarnation in store.incarnations(version):
            if incarnation != live:
                store.delete_incarnation(version, incarnation)
    return sorted(removed)


def _buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors in their order, on the CPU, none sharing memory with another of its bucket."""
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
    bucket: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    size = 0
    for name, given in named_tensors:
        tensor = given.detach().cpu().contiguous()
        if bucket and (size + tensor.nbytes > bucket_bytes or name in bucket):
            yield bucket
            bucket, storages, size = {}, set(), 0
        storage = tensor.untyped_storage().data_ptr()
        if storage in storages:
            tensor = tensor.clone()
        storages.add(storage)
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def _verified_buckets(store: WeightStore, publication: Publication) -> Iterator[dict[str, torch.Tensor]]:
    version, entries = publication.version, publication.buckets
    for start in range(0, len(entries), _BUCKETS_AT_A_TIME):
        window = entries[start : start + _BUCKETS_AT_A_TIME]
        try:
            found = store.get_buckets(version, [entry.name for entry in window])
        except MissingObject as error:
            raise MissingWeights(f"version {version}: {error}") from None
        for entry, data in zip(window, found, strict=True):
            if len(data) != entry.size:
                raise TruncatedWeights(
                    f"version {version}: bucket {entry.name} has {len(data)} bytes, not {entry.size}"
                )
            if _checksum(data) != entry.checksum:
                raise CorruptWeights(f"version {version}: bucket {entry.name} has another checksum")
            try:
                yield safetensors.torch.load(data)
            except SafetensorError as error:
                raise CorruptWeights(f"version {version}: bucket {entry.name}: {error}") from None


def _newest_before(store: WeightStore, version: int) -> Publication | None:
    older = [published for published in store.versions() if published < version]
    return read_publication(store, older[-1]) if older else None


def _changed(tensors: Mapping[str, TensorEntry], before: Mapping[str, TensorEntry]) -> int:
    """Tensors that are new, gone, or of other content, shape or dtype than before."""

    def content(entry: TensorEntry | None) -> Any:
        return entry and (entry.shape, entry.dtype, entry.checksum)

    return sum(
        content(tensors.get(name)) != content(before.get(name)) for name in tensors.keys() | before.keys()
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _checksum(data: Any) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _few(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
