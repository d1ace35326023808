"""The sample buffer: trajectories on an object store, each written once, and the batches made of them.

    trajectories/v00000007/g00000012-m001-a00.arrow    partitioned by initiating policy version
    batches/00000003.json                              the manifest of train step 3

There is no database. A trajectory's name is deterministic and its object is created conditionally, so a
retry never doubles it. A batch is committed by one conditional write of its manifest: what is consumed is
what manifests name.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from infra.object_store import ObjectStore

_VERSION = re.compile(r"v(\d{8,})")


class Sample(NamedTuple):
    """Where a trajectory lies: its name (the text of its key) and its initiating policy version."""

    name: str
    version: int


class SampleBuffer:
    """Holds bytes; what they mean is the writer's and the reader's. Safe for concurrent use by threads."""

    def __init__(self, store: ObjectStore):
        self.store = store

    def put(self, name: str, version: int, data: bytes) -> bool:
        """Write a trajectory; False, and nothing changed, when this name is there in this version."""
        return self.store.create(_key(name, version), data)

    def get_many(self, samples: Sequence[tuple[str, int]]) -> list[bytes]:
        """Trajectories in the order asked. Raises `MissingObject`."""
        return self.store.get_many([_key(name, version) for name, version in samples])

    def names(self) -> list[Sample]:
        """Every trajectory held, by version and name; consumed ones too, until they are dropped.

        A name is unique within a version. It is there under two versions when an attempt was repeated after
        a restart, with another version initiating it; at most one of the two may be consumed.
        """
        found = []
        for key in self.store.list("trajectories"):
            _, folder, file = key.split("/")
            found.append(Sample(file.removesuffix(".arrow"), _version(folder)))
        return found

    def drop(self, samples: Iterable[tuple[str, int]]) -> None:
        """Remove single trajectories, for example consumed ones once they are archived."""
        self.store.delete_many(_key(name, version) for name, version in samples)

    def drop_before(self, version: int) -> list[int]:
        """Remove every trajectory that an older version initiated. Returns the versions dropped."""
        stale = [v for v in map(_version, self.store.folders("trajectories")) if v < version]
        for dropped in stale:
            self.store.delete(f"trajectories/{_folder(dropped)}")
        return stale

    def commit_batch(self, step: int, manifest: bytes) -> bool:
        """Write the manifest of a train step; False, and nothing changed, when that step has one.

        Survives a power cut once this returns.
        """
        return self.store.create(_batch(step), manifest, durable=True)

    def read_batches(self, steps: Sequence[int]) -> list[bytes]:
        """Manifests in the order asked. Raises `MissingObject`."""
        return self.store.get_many([_batch(step) for step in steps])

    def batches(self) -> list[int]:
        """The train steps that have a manifest, ascending."""
        return sorted(
            int(key.removeprefix("batches/").removesuffix(".json")) for key in self.store.list("batches")
        )


def _key(name: str, version: int) -> str:
    if "/" in name:
        raise ValueError(f"{name!r} is no name of a trajectory: it is one part of a key")
    return f"trajectories/{_folder(version)}/{name}.arrow"


def _folder(version: int) -> str:
    if version < 0:
        raise ValueError(f"a policy version is not negative: {version}")
    return f"v{version:08d}"


def _version(folder: str) -> int:
    match = _VERSION.fullmatch(folder)
    if match is None:
        raise ValueError(f"{folder!r} is no version folder of a sample buffer")
    return int(match[1])


def _batch(step: int) -> str:
    if step < 0:
        raise ValueError(f"a train step is not negative: {step}")
    return f"batches/{step:08d}.json"
