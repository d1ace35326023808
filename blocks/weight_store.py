"""The weight store: published policy versions on an object store, or in a Mooncake store.

v00000007/manifest.json               written last: with it, and only with it, the version is published
v00000007/3f9c…/00000.safetensors     buckets of one incarnation, that is of one try to publish
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from blocks.ranged_objects import RangedObjects
from infra.object_store import Data

_FOLDER = re.compile(r"v(\d{8,})")
_BUCKET = re.compile(r"[0-9a-zA-Z_]+/[0-9a-z]+\.safetensors")


class WeightObjects(Protocol):
    """What a weight store needs of a back end: `infra.object_store` or `blocks.mooncake`.

    Keys are parts joined by `/`. A reader sees an object whole or not at all. Only a manifest is put again.
    """

    url: str

    def put(self, key: str, data: Data, *, durable: bool = False) -> None: ...
    def get(self, key: str) -> bytes: ...
    def get_many(self, keys: Sequence[str]) -> Sequence[Data]: ...
    def exists(self, key: str) -> bool: ...
    def folders(self, prefix: str = "") -> list[str]: ...
    def delete(self, key: str) -> None: ...
    def delete_many(self, keys: Iterable[str]) -> None: ...


@runtime_checkable
class RangeReader(Protocol):
    """A back end that reads parts of objects; of another one, whole objects are read and cut."""

    def get_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> Sequence[Data]: ...


class WeightStore:
    """Holds bytes; a publication gives them meaning. Safe for concurrent use by threads.

    Any number of processes may read; one at a time publishes and deletes (the trainer's lease sees to it).
    """

    def __init__(self, store: WeightObjects):
        self.store = store

    @property
    def url(self) -> str:
        return self.store.url

    def put_bucket(
        self, version: int, incarnation: str, index: int, data: Data, *, kind: str = "", durable: bool = False
    ) -> str:
        """Write one bucket and return its name, which `get_buckets` takes. `kind` sets series apart."""
        name = f"{incarnation}/{kind}{index:05d}.safetensors"
        self.store.put(f"{_folder(version)}/{name}", data, durable=durable)
        return name

    def get_buckets(self, version: int, names: Sequence[str]) -> Sequence[Data]:
        """Buckets in the order asked. Raises `MissingObject`; ValueError for what is no bucket's name."""
        return self.store.get_many([_bucket(version, name) for name in names])

    def get_ranges(self, version: int, ranges: Sequence[tuple[str, int, int]]) -> Sequence[Data]:
        """Bytes (bucket, offset, size) in the order asked, shorter where the bucket is. As `get_buckets`."""
        keys = [(_bucket(version, name), offset, size) for name, offset, size in ranges]
        if isinstance(self.store, RangeReader):
            return self.store.get_ranges(keys)
        names = list(dict.fromkeys(key for key, _, _ in keys))
        whole = dict(zip(names, self.store.get_many(names), strict=True))
        return [memoryview(whole[key])[offset : offset + size] for key, offset, size in keys]

    def put_manifest(self, version: int, manifest: bytes, *, durable: bool = False) -> None:
        """Publish the version, in place of an earlier incarnation."""
        self.store.put(_manifest(version), manifest, durable=durable)

    def get_manifest(self, version: int) -> bytes:
        """Raises `MissingObject` when the version is not published."""
        return self.store.get(_manifest(version))

    def versions(self) -> list[int]:
        """Published versions, ascending."""
        return sorted(version for version in self.folders() if self.store.exists(_manifest(version)))

    def newest(self) -> int | None:
        """The highest published version; None when there is none."""
        return self.newest_below(None)

    def newest_below(self, bound: int | None) -> int | None:
        """The highest published version below a bound; None when there is none."""
        for version in sorted(self.folders(), reverse=True):
            if (bound is None or version < bound) and self.store.exists(_manifest(version)):
                return version
        return None

    def folders(self) -> list[int]:
        """Versions of which anything is stored, published or not."""
        matches = [_FOLDER.fullmatch(name) for name in self.store.folders()]
        return [int(match[1]) for match in matches if match is not None]

    def incarnations(self, version: int) -> list[str]:
        """Incarnations of a version that have buckets, published or not."""
        return self.store.folders(_folder(version))

    def delete(self, version: int) -> None:
        """Withdraw a version: its manifest first, so that no reader finds it named and half gone."""
        self.store.delete_many([_manifest(version)])
        self.store.delete(_folder(version))

    def delete_incarnation(self, version: int, incarnation: str) -> None:
        self.store.delete(f"{_folder(version)}/{incarnation}")


def open_weight_store(url: str, options: dict[str, Any] | None = None) -> WeightStore:
    """The weight store at a URL: a directory, any fsspec URL, or `mooncake://host:port/prefix`.

    `options` go to its file system (credentials, endpoint) or are `blocks.mooncake.MooncakeSettings`.
    Raises ValueError on a wrong URL and `blocks.mooncake.WeightStoreUnavailable` where no master answers.
    """
    if url.startswith("mooncake://"):
        from blocks.mooncake import MooncakeObjects

        return WeightStore(MooncakeObjects.open(url, options))
    return WeightStore(RangedObjects(url, options))


def _folder(version: int) -> str:
    if version < 0:
        raise ValueError(f"a policy version is not negative: {version}")
    return f"v{version:08d}"


def _manifest(version: int) -> str:
    return f"{_folder(version)}/manifest.json"


def _bucket(version: int, name: str) -> str:
    if not _BUCKET.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a bucket")
    return f"{_folder(version)}/{name}"
