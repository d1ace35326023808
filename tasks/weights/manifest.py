"""What the manifest of a published version says, and the errors of reading one.

The unit is a *piece*: a tensor, or a slice of it along the dimension that tensor parallelism splits. Each
piece has a checksum of its content in full, however it travels: in a bucket of the snapshot, as the bits that
changed since the base version, or both.
"""

from typing import Literal, Self

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from blocks.weight_store import WeightStore
from infra.object_store import MissingObject


class WeightsError(RuntimeError):
    """A published version cannot be used, or these weights cannot be published."""


class MissingWeights(WeightsError):
    """The version is not published, or a bucket or base version that its manifest names is gone."""


class TruncatedWeights(WeightsError):
    """A bucket is shorter or longer than its manifest says."""


class CorruptWeights(WeightsError):
    """A checksum does not match, or the manifest cannot be read."""


class MismatchedWeights(WeightsError):
    """Names, shapes or dtypes are not those expected."""


Encoding = Literal["same", "xor", "sparse", "raw"]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BucketEntry(_Entry):
    name: str
    size: NonNegativeInt  # bytes


class Place(_Entry):
    """Where a piece's bytes lie."""

    bucket: NonNegativeInt
    offset: NonNegativeInt  # bytes from the bucket's start


class DeltaPlace(Place):
    """Where what changed of a piece lies."""

    encoding: Encoding
    size: NonNegativeInt  # bytes as encoded


class PieceEntry(_Entry):
    size: NonNegativeInt  # bytes of the content
    checksum: str  # xxh3-128 of the content, hexadecimal
    full: Place | None = None
    delta: DeltaPlace | None = None


class TensorEntry(_Entry):
    shape: tuple[NonNegativeInt, ...]
    dtype: str  # as torch writes it, without `torch.`
    split: NonNegativeInt | None = None  # dimension along which the pieces are slices
    pieces: tuple[PieceEntry, ...]

    @property
    def content(self) -> object:
        """Equal for two tensors that are the same bit for bit and cut alike."""
        return self.shape, self.dtype, self.split, tuple(piece.checksum for piece in self.pieces)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CorruptWeights(f"a manifest names the dtype {self.dtype!r}, which there is not")
        return dtype

    def piece_shape(self, index: int) -> tuple[int, ...]:
        if self.split is None:
            return self.shape
        start, stop = bounds(self.shape[self.split], len(self.pieces), index)
        return (*self.shape[: self.split], stop - start, *self.shape[self.split + 1 :])


class BaseEntry(_Entry):
    """The very publication to which the deltas apply."""

    version: NonNegativeInt
    incarnation: str


class Publication(_Entry):
    """The manifest of a published policy version."""

    version: NonNegativeInt
    incarnation: str
    buckets: tuple[BucketEntry, ...]  # of the snapshot; none in a version that is a delta only
    delta_buckets: tuple[BucketEntry, ...]
    tensors: dict[str, TensorEntry]
    base: BaseEntry | None  # what the deltas apply to; None without them
    depth: NonNegativeInt  # deltas since the newest snapshot; 0 in a version that holds one
    delta_follows: bool  # the publisher makes deltas: a reader that keeps the weights can use the next one
    compared_with: int | None  # the newest older version that was published; None when there was none
    changed: NonNegativeInt  # tensors that are not, bit for bit, those of that version
    unchanged: bool  # nothing changed since that version: an update that reached no weight
    digest: str = ""  # xxh3-128 of this manifest with an empty digest

    @property
    def size(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.size for bucket in (*self.buckets, *self.delta_buckets))

    @property
    def content_size(self) -> int:
        """Bytes of the weights in full."""
        return sum(piece.size for entry in self.tensors.values() for piece in entry.pieces)

    @property
    def delta_size(self) -> int:
        """Bytes that a reader of the base version pulls."""
        return sum(bucket.size for bucket in self.delta_buckets)

    def seal(self) -> Self:
        return self.model_copy(update={"digest": self._computed_digest()})

    def require_sound(self) -> None:
        """Raise `CorruptWeights` unless this is what was written and leads nowhere impossible."""
        if self.digest != self._computed_digest():
            raise CorruptWeights(f"version {self.version}: the manifest has another checksum")
        if (self.depth > 0 and self.base is None) or (self.base and self.base.version >= self.version):
            raise CorruptWeights(f"version {self.version}: the manifest names an impossible base")

    def _computed_digest(self) -> str:
        return checksum(self.model_copy(update={"digest": ""}).model_dump_json().encode())


def read_publication(store: WeightStore, version: int) -> Publication:
    """The manifest of a version. Raises `MissingWeights` or `CorruptWeights`."""
    try:
        data = store.get_manifest(version)
    except MissingObject:
        raise MissingWeights(
            f"version {version} is not published in {store.url} (published: {store.versions()})"
        ) from None
    try:
        publication = Publication.model_validate_json(data)
    except ValidationError as error:
        raise CorruptWeights(f"version {version}: the manifest cannot be read: {error}") from None
    if publication.version != version:
        raise CorruptWeights(f"the manifest of version {version} says it is of {publication.version}")
    publication.require_sound()
    return publication


def bounds(length: int, pieces: int, index: int) -> tuple[int, int]:
    """Start and stop of one of `pieces` slices of nearly equal length."""
    return length * index // pieces, length * (index + 1) // pieces


def checksum(data: object) -> str:
    """xxh3-128 of a contiguous buffer, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)  # type: ignore[arg-type]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
