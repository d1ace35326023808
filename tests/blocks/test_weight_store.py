"""The weight store: a version exists by its manifest."""

import uuid
from pathlib import Path

import pytest

from blocks.weight_store import WeightStore
from infra.object_store import MissingObject, ObjectStore


@pytest.fixture(params=["local", "memory"])
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> WeightStore:
    url = str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    return WeightStore(ObjectStore(url))


def test_buckets_without_a_manifest_are_no_version(weights: WeightStore) -> None:
    name = weights.put_bucket(3, "first", 0, b"bucket")
    assert weights.versions() == []
    assert weights.newest() is None
    with pytest.raises(MissingObject):
        weights.get_manifest(3)
    weights.put_manifest(3, b"manifest")
    assert weights.versions() == [3]
    assert weights.newest() == 3
    assert weights.get_manifest(3) == b"manifest"
    assert weights.get_buckets(3, [name]) == [b"bucket"]


def test_versions_are_numbers_not_text(weights: WeightStore) -> None:
    for version in (2, 100_000_001, 10):
        weights.put_manifest(version, b"")
    weights.put_bucket(100_000_002, "unfinished", 0, b"")
    assert weights.versions() == [2, 10, 100_000_001]
    assert weights.newest() == 100_000_001


def test_a_deleted_version_is_gone_with_its_buckets(weights: WeightStore) -> None:
    for version in (1, 2):
        weights.put_bucket(version, "a", 0, b"x")
        weights.put_manifest(version, b"")
    weights.put_bucket(2, "b", 0, b"y")
    weights.delete(1)
    weights.delete_incarnation(2, "a")
    assert weights.versions() == [2]
    assert weights.store.list() == ["v00000002/b/00000.safetensors", "v00000002/manifest.json"]
