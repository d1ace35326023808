"""The weight store: a version exists by its manifest."""

import uuid
from pathlib import Path

import pytest

from blocks.ranged_objects import RangedObjects
from blocks.weight_store import WeightStore, open_weight_store
from infra.object_store import MissingObject, OutsideStore
from tests.mooncake import fresh_url


@pytest.fixture(params=["local", "memory", "mooncake"])
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> WeightStore:
    if request.param == "mooncake":
        return open_weight_store(fresh_url())
    return open_weight_store(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def test_buckets_without_a_manifest_are_no_version(weights: WeightStore) -> None:
    name = weights.put_bucket(3, "first", 0, b"bucket")
    assert weights.versions() == []
    assert weights.newest() is None
    assert weights.folders() == [3]
    assert weights.incarnations(3) == ["first"]
    with pytest.raises(MissingObject):
        weights.get_manifest(3)
    weights.put_manifest(3, b"manifest")
    assert weights.versions() == [3]
    assert weights.newest() == 3
    assert weights.get_manifest(3) == b"manifest"
    assert [bytes(data) for data in weights.get_buckets(3, [name])] == [b"bucket"]


def test_a_manifest_that_is_put_again_replaces_the_first(weights: WeightStore) -> None:
    for manifest in (b"first", b"second, and longer", b"3rd"):
        weights.put_manifest(1, manifest)
        assert weights.get_manifest(1) == manifest
        assert weights.versions() == [1]


def test_versions_are_numbers_not_text(weights: WeightStore) -> None:
    for version in (2, 100_000_001, 10):
        weights.put_manifest(version, b"manifest")
    weights.put_bucket(100_000_002, "unfinished", 0, b"x")
    assert weights.versions() == [2, 10, 100_000_001]
    assert weights.newest() == 100_000_001
    assert weights.newest_below(100_000_001) == 10
    assert weights.newest_below(2) is None


def test_a_deleted_version_is_gone_with_its_buckets(weights: WeightStore) -> None:
    names = {}
    for version in (1, 2, 21):
        names[version] = weights.put_bucket(version, "a", 0, b"x")
        weights.put_manifest(version, b"manifest")
    weights.put_bucket(2, "b", 0, b"y")
    weights.delete(1)
    weights.delete_incarnation(2, "a")
    weights.delete(7)
    assert weights.versions() == [2, 21]
    assert sorted(weights.folders()) == [2, 21]
    assert weights.incarnations(2) == ["b"]
    assert weights.incarnations(21) == ["a"]
    for version in (1, 2):
        with pytest.raises(MissingObject):
            weights.get_buckets(version, [names[version]])
    assert bytes(weights.get_buckets(21, [names[21]])[0]) == b"x"


def test_parts_of_buckets_are_read(weights: WeightStore) -> None:
    names = [weights.put_bucket(1, "a", index, bytes(range(index, index + 100))) for index in range(2)]
    found = weights.get_ranges(1, [(names[1], 10, 3), (names[0], 0, 1), (names[0], 97, 3), (names[1], 5, 0)])
    assert [bytes(data) for data in found] == [bytes([11, 12, 13]), b"\0", bytes([97, 98, 99]), b""]
    assert len(weights.get_ranges(1, [(names[0], 90, 20)])[0]) < 20
    with pytest.raises(MissingObject):
        weights.get_ranges(1, [(names[0], 0, 1), ("a/00007.safetensors", 0, 1)])


@pytest.mark.parametrize(
    "name", ["../../x/00000.safetensors", "a/../b.safetensors", "/etc/passwd", "a/manifest.json"]
)
def test_no_name_of_a_bucket_leads_elsewhere(weights: WeightStore, name: str) -> None:
    with pytest.raises(ValueError, match="no name of a bucket"):
        weights.get_buckets(1, [name])
    with pytest.raises(ValueError, match="no name of a bucket"):
        weights.get_ranges(1, [(name, 0, 1)])


def test_no_link_leads_a_range_out_of_a_local_store(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    store = RangedObjects(str(tmp_path / "store"))
    store.put("a/b", b"inside")
    (tmp_path / "store/a/link").symlink_to(tmp_path / "secret")
    assert store.get_ranges([("a/b", 2, 3)]) == [b"sid"]
    with pytest.raises(OutsideStore):
        store.get_ranges([("a/link", 0, 3)])
    with pytest.raises(ValueError, match="no object key"):
        store.get_ranges([("../secret", 0, 3)])
