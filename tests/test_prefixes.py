"""Names and keys from outside stay in their prefix: nothing is read, written or removed elsewhere."""

import contextlib
import json
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocks.sample_buffer import SampleBuffer
from blocks.weight_store import open_weight_store
from infra.object_store import ObjectStore, OutsideStore
from tasks.campaign import Campaign, CampaignError
from tasks.run_folder import RunFolder
from tasks.train.checkpoint import Checkpoints
from tasks.weights.publication import WeightsError, load

PARTS = ["..", ".", "", "a", "secret", "prefix", "link", "~", "%2e%2e", "..%2f", "*", "v00000001"]
NAMES = st.one_of(
    st.text(max_size=16),
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=6).map("/".join),
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map("\\".join),
    st.sampled_from(
        ["/etc/passwd", "../secret", "link/secret", "a/../../secret", "secret\x00", "file:///secret"]
    ),
)
WEATHER = settings(deadline=None, max_examples=80)
# What a bad name may raise; anything else is a fault.
REFUSED = (ValueError, KeyError, LookupError, OSError, WeightsError)


class Trap:
    """A store in a prefix, with a secret beside it, a link to it inside, and a look for what changed."""

    def __init__(self, base: Path):
        self.base = base
        self.inside = base / "prefix"
        self.outside = base / "outside"
        self.inside.mkdir()
        self.outside.mkdir()
        for path in (base / "secret", self.outside / "secret"):
            path.write_bytes(b"secret")
        (self.inside / "link").symlink_to(self.outside)
        self.store = ObjectStore(str(self.inside))

    def seen(self) -> dict[str, bytes]:
        return {
            str(path): path.read_bytes() if path.is_file() else b""
            for path in self.base.rglob("*")
            if not path.is_relative_to(self.inside)
        }


@contextlib.contextmanager
def trap() -> Iterator[Trap]:
    base = Path(tempfile.mkdtemp())
    try:
        laid = Trap(base)
        before = laid.seen()
        yield laid
        assert laid.seen() == before
    finally:
        shutil.rmtree(base)


@WEATHER
@given(NAMES)
def test_no_key_reads_writes_or_removes_outside(name: str) -> None:
    with trap() as laid:
        for write in (laid.store.put, laid.store.create):
            with contextlib.suppress(*REFUSED):
                write(name, b"evil")
        for remove in (laid.store.delete, lambda key: laid.store.delete_many([key])):
            with contextlib.suppress(*REFUSED):
                remove(name)
        for read in (laid.store.get, lambda key: laid.store.get_many([key])[0]):
            with contextlib.suppress(*REFUSED):
                assert read(name) != b"secret"
        with contextlib.suppress(*REFUSED):
            assert not any("secret" in key for key in laid.store.list(name))


@WEATHER
@given(NAMES, st.integers(0, 3))
def test_no_trajectory_name_reads_writes_or_drops_outside(name: str, version: int) -> None:
    with trap() as laid:
        buffer = SampleBuffer(laid.store)
        with contextlib.suppress(*REFUSED):
            buffer.put(name, version, b"evil")
            # What was taken is found under the name it was given, in its version.
            assert [(name, version)] == [tuple(sample) for sample in buffer.names()]
        with contextlib.suppress(*REFUSED):
            assert buffer.get_many([(name, version)]) == [b"evil"]
        with contextlib.suppress(*REFUSED):
            buffer.drop([(name, version)])


@WEATHER
@given(NAMES)
def test_no_part_that_a_checkpoint_names_is_read_outside(name: str) -> None:
    with trap() as laid:
        promise = {"bytes": 6, "xxh3": ""}
        marker = {name: promise, "state.json": promise}
        laid.store.put("step-00000001/_SUCCESS", json.dumps(marker).encode())
        laid.store.put("step-00000001/state.json", b'{"step"')
        with pytest.raises(REFUSED):
            Checkpoints(laid.store, keep=1).load()


@WEATHER
@given(NAMES)
def test_no_bucket_that_a_manifest_of_weights_names_is_read_outside(name: str) -> None:
    with trap() as laid:
        weights = open_weight_store(str(laid.inside))
        with contextlib.suppress(*REFUSED):
            weights.get_buckets(1, [name])
            pytest.fail(f"{name!r} was read")
        with pytest.raises(REFUSED):
            weights.put_bucket(1, f"../../{name}", 0, b"evil")
        manifest = {"version": 1, "incarnation": "a", "buckets": [{"name": name, "size": 6, "checksum": ""}]}
        rest: dict[str, Any] = {"tensors": {}, "compared_with": None, "changed": 0, "unchanged": True}
        weights.put_manifest(1, json.dumps({**manifest, **rest}).encode())
        with pytest.raises(REFUSED):
            load(weights, 1)


@WEATHER
@given(NAMES)
def test_no_run_name_leads_out_of_the_runs(name: str) -> None:
    root = f"memory://{uuid.uuid4().hex}/runs"
    campaign = Campaign.parse({**MINIMAL, "stores": {"runs": "/srv/runs", "root": root}})
    try:
        folder = RunFolder.of(campaign, name)
    except CampaignError:
        return
    assert folder.root.parent == Path("/srv/runs")
    assert folder.root.name == name
    for url in (folder.samples_url, folder.weights_url, folder.checkpoints_url, folder.files_url):
        assert str(url).startswith(f"{root}/{name}")
        assert ".." not in str(url).split("/")


MINIMAL: dict[str, Any] = {"name": "x", "domains": {"a": {"source": "gem"}}}


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "a\\b", "a b", ".hidden", "a\x00"])
def test_a_domain_is_named_by_a_plain_name(name: str) -> None:
    with pytest.raises(CampaignError, match="domains"):
        Campaign.parse({**MINIMAL, "domains": {name: {"source": "gem"}}})


@pytest.mark.parametrize("option", ["root", "samples", "weights", "checkpoints"])
def test_a_store_says_where_it_lies_without_dots_or_passwords(option: str) -> None:
    for url in ("s3://bucket/a/../b", "s3://bucket/..", "s3://name:hunter2@bucket/x"):
        with pytest.raises(CampaignError, match=rf"stores\.{option}") as caught:
            Campaign.parse({**MINIMAL, "stores": {option: url}})
        assert "hunter2" not in str(caught.value)
    with pytest.raises(ValueError, match="part"):
        ObjectStore("memory://bucket/a/../b")


def test_links_inside_of_a_local_store_are_not_followed_out() -> None:
    with trap() as laid:
        store = laid.store
        (laid.inside / "file").symlink_to(laid.outside / "secret")
        for operation in (
            lambda: store.get("link/secret"),
            lambda: store.get("file"),
            lambda: store.get_many(["file"]),
            lambda: store.put("link/new", b"evil"),
            lambda: store.put("link/deep/er/new", b"evil"),
            lambda: store.create("link/new", b"evil", durable=True),
            lambda: store.delete("link/secret"),
            lambda: store.delete_many(["link/secret"]),
            lambda: store.list("link"),
            lambda: store.sub("link").get("secret"),
            lambda: store.sub("link").put("secret", b"evil"),
        ):
            with pytest.raises(OutsideStore):
                operation()
        assert store.list() == []
        assert store.folders() == []
        assert not store.exists("file")
        assert not store.exists("link/secret")
        assert not store.create("file", b"evil"), "what is there stays"
        store.put("file", b"mine")  # in place of the link
        assert store.get("file") == b"mine"
        store.delete("link")  # the link itself
        assert store.list() == ["file"]


def test_a_store_may_itself_lie_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    store = ObjectStore(str(tmp_path / "runs" / "r1"))
    assert store.create("a/b", b"1")
    store.put("a/b", b"2")
    assert store.get("a/b") == b"2"
    assert store.list() == ["a/b"]
    store.delete("a")
    assert store.list() == []
