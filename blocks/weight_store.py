"""The weight store: published policy versions on an object store.

v00000007/manifest.json               written last: with it, and only with it, the version is published
v00000007/3f9c…/00000.safetensors     buckets of one incarnation, that is of one try to publish
"""

import re
from collections.abc import Sequence
from typing import Any

from infra.object_store import ObjectStore

_FOLDER = re.compile(r"v(\d{8,})")


class WeightStore:
    """Holds bytes; a publication gives them meaning. Safe for concurrent use by threads."""

    def __init__(self, store: ObjectStore):
        self.store = store

    def put_bucket(
        self, version: int, incarnation: str, index: int, data: bytes, *, durable: bool = False
    ) -> str:
        """Write one bucket and return its name, which `get_buckets` takes."""
        name = f"{incarnation}/{index:05d}.safetensors"
        self.store.put(f"{_folder(version)}/{name}", data, durable=durable)
        return name

    def get_buckets(self, version: int, names: Sequence[str]) -> list[bytes]:
        """Buckets in the order asked. Raises `MissingObject`."""
        return self.store.get_many([f"{_folder(version)}/{name}" for name in names])

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
        for version in sorted(self.folders(), reverse=True):
            if self.store.exists(_manifest(version)):
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
    """The weight store at a URL; `options` go to its file system (credentials, endpoint)."""
    return WeightStore(ObjectStore(url, options))


def _folder(version: int) -> str:
    if version < 0:
        raise ValueError(f"a policy version is not negative: {version}")
    return f"v{version:08d}"


def _manifest(version: int) -> str:
    return f"{_folder(version)}/manifest.json"
