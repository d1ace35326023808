"""The promises of the object store: whole objects, conditional creation, keys that stay inside."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from infra.object_store import MissingObject, ObjectStore, UnsupportedStore
from infra.remote_files import UnreachableStore


def test_put_replaces_and_get_returns_what_was_put(store: ObjectStore) -> None:
    store.put("a/b.json", b"one")
    store.put("a/b.json", b"two")
    store.put("empty", b"")
    assert store.get("a/b.json") == b"two"
    assert store.get("empty") == b""
    assert store.get_many(["empty", "a/b.json"]) == [b"", b"two"]


def test_buffers_of_any_kind_are_stored_as_their_bytes(store: ObjectStore) -> None:
    store.put("bytearray", bytearray(b"abc"))
    assert store.create("view", memoryview(b"xabcx")[1:4])
    assert store.get_many(["bytearray", "view"]) == [b"abc", b"abc"]


def test_create_succeeds_once_and_changes_nothing_afterwards(store: ObjectStore) -> None:
    assert store.create("batches/1", b"first")
    assert not store.create("batches/1", b"second")
    assert store.get("batches/1") == b"first"
    store.delete("batches/1")
    assert store.create("batches/1", b"third", durable=True)
    assert store.get("batches/1") == b"third"


def test_what_is_not_there_is_a_typed_error_that_names_it(store: ObjectStore) -> None:
    store.put("folder/x", b"x")
    for missing in ("nothing", "folder", "folder/y", "folder/deeper/z"):
        assert not store.exists(missing)
        with pytest.raises(MissingObject, match=missing):
            store.get(missing)
        with pytest.raises(MissingObject, match=missing):
            store.get_many(["folder/x", missing])
    assert store.exists("folder/x")
    error = pickle.loads(pickle.dumps(MissingObject("memory://a", "key")))
    assert (error.url, error.key) == ("memory://a", "key")


def test_lists_are_sorted_and_prefixes_are_whole_parts(store: ObjectStore) -> None:
    assert store.list() == []
    assert store.folders() == []
    for key in ("b/2", "b/1", "b/c/3", "b2/1", "a"):
        store.put(key, b"")
    assert store.list() == ["a", "b/1", "b/2", "b/c/3", "b2/1"]
    assert store.list("b") == ["b/1", "b/2", "b/c/3"]
    assert store.list("b/c") == ["b/c/3"]
    assert store.list("nothing/here") == []
    assert store.folders() == ["b", "b2"]
    assert store.folders("b") == ["c"]
    assert store.folders("nothing") == []


def test_delete_takes_a_key_or_a_whole_prefix(store: ObjectStore) -> None:
    for key in ("b/1", "b/c/3", "b2/1", "a", "d"):
        store.put(key, b"")
    store.delete("b")
    store.delete("a")
    store.delete("never/there")
    assert store.list() == ["b2/1", "d"]
    assert "b2" in store.folders()
    store.delete_many(["d", "not-there", "b2/1"])
    assert store.list() == []
    store.delete_many([])


def test_a_sub_store_sees_its_prefix_only(store: ObjectStore) -> None:
    store.put("other", b"")
    inner = store.sub("runs/r1")
    assert inner.create("x/y", b"1")
    assert store.get("runs/r1/x/y") == b"1"
    assert inner.list() == ["x/y"]
    assert inner.sub("x").list() == ["y"]
    assert inner.url == f"{store.url}/runs/r1"
    assert inner.is_local == store.is_local


@pytest.mark.parametrize(
    "key",
    [
        *("", "/", " /", "/abs", "a/", "a//b", ".", "..", "a/../b", "a/..", "./a", "a/.hidden", "a\\b"),
        *("a*", "a b", "ä", "a\n", "a\x00", "~/x", "file://x", "[a]"),
    ],
)
def test_no_key_leaves_the_prefix(key: str, tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path / "inside"))
    for operation in (store.get, store.exists, store.delete, store.sub):
        with pytest.raises(ValueError, match="no object key"):
            operation(key)
    with pytest.raises(ValueError, match="no object key"):
        store.put(key, b"x")
    with pytest.raises(ValueError, match="no object key"):
        store.create(key, b"x")
    assert list(tmp_path.iterdir()) == []


def test_urls_say_where_the_store_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ObjectStore("relative").put("x", b"1")
    ObjectStore(f"file://{tmp_path}/absolute").put("x", b"2")
    assert (tmp_path / "relative/x").read_bytes() == b"1"
    assert (tmp_path / "absolute/x").read_bytes() == b"2"
    assert ObjectStore("relative").url == str(tmp_path / "relative")
    assert ObjectStore("relative").is_local
    assert ObjectStore(f"file://{tmp_path}/absolute").is_local
    assert not ObjectStore("memory://x").is_local


def test_a_back_end_that_only_looks_before_it_writes_is_refused(tmp_path: Path) -> None:
    store = ObjectStore("dir://store", {"path": str(tmp_path), "target_protocol": "file"})
    (tmp_path / "store").mkdir()
    store.put("x", b"1")
    with pytest.raises(UnsupportedStore, match=r"stores\.samples"):
        store.create("y", b"1")


def _race(url: str, options: dict[str, object] | None, writer: int, keys: int) -> list[int]:
    store = ObjectStore(url, options)
    return [key for key in range(keys) if store.create(f"race/{key}", b"%d" % writer * 5000)]


def test_of_concurrent_processes_exactly_one_creates_each_key(tmp_path: Path) -> None:
    keys, writers = 200, 4
    with multiprocessing.get_context("spawn").Pool(writers) as pool:
        won = pool.starmap(_race, [(str(tmp_path), None, writer, keys) for writer in range(writers)])
    assert sorted(key for keys_won in won for key in keys_won) == list(range(keys))
    store = ObjectStore(str(tmp_path))
    for writer, keys_won in enumerate(won):
        for key in keys_won:
            assert store.get(f"race/{key}") == b"%d" % writer * 5000


def test_of_concurrent_threads_exactly_one_creates_each_key(store: ObjectStore) -> None:
    keys, writers = 10, 8
    with ThreadPoolExecutor(writers) as pool:
        won = list(
            pool.map(
                lambda writer: [key for key in range(keys) if store.create(f"{key}", b"%d" % writer)],
                range(writers),
            )
        )
    assert sorted(key for keys_won in won for key in keys_won) == list(range(keys))


def test_a_writer_killed_in_the_middle_leaves_nothing_half(tmp_path: Path) -> None:
    size = 4_000_000
    program = textwrap.dedent(
        f"""
        import sys
        from infra.object_store import ObjectStore
        store = ObjectStore(sys.argv[1])
        for round in range(10**9):
            data = b"%d" % (round % 10) * {size}
            store.put("same", data)
            store.create("new/%d" % round, data)
            if round > 2:
                store.delete("new/%d" % (round - 3))
            print("wrote", flush=True)
        """
    )
    store = ObjectStore(str(tmp_path))
    for round in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, cwd=os.getcwd()
        )
        assert writer.stdout is not None
        for _ in range(3 + round):
            assert writer.stdout.readline() == b"wrote\n"
            _assert_whole(store, size)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        _assert_whole(store, size)
        assert store.exists("same")
    store.delete("new")
    assert [path for path in tmp_path.rglob("*") if "new" in path.parts] == []


def _assert_whole(store: ObjectStore, size: int) -> None:
    for key in store.list():
        try:
            data = store.get(key)
        except MissingObject:
            continue  # deleted since it was listed
        assert len(data) == size
        assert data == data[:1] * size


def test_a_prefix_dropped_under_a_writer_does_not_fail_the_writer(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))

    def write(writer: int) -> None:
        for index in range(300):
            store.put(f"v1/{writer}-{index}", b"x")

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, writer) for writer in range(2)]
        while not all(writer.done() for writer in writers):
            store.delete("v1")
        for done in writers:
            done.result()
    store.delete("v1")
    assert store.list() == []


@pytest.mark.slow
def test_another_clients_writes_show_in_listings(s3_options: dict[str, object]) -> None:
    url = f"s3://tutti/{uuid.uuid4().hex}"
    here, there = ObjectStore(url, s3_options), ObjectStore(url, {**s3_options, "skip_instance_cache": True})
    here.put("a/1", b"")
    assert here.list() == ["a/1"]
    there.put("a/2", b"")
    there.delete("a/1")
    assert here.list() == ["a/2"]
    assert not here.exists("a/1")
    assert here.folders() == ["a"]


@pytest.mark.slow
def test_of_concurrent_processes_exactly_one_creates_each_key_on_s3(s3_options: dict[str, object]) -> None:
    url, keys, writers = f"s3://tutti/{uuid.uuid4().hex}", 20, 3
    with multiprocessing.get_context("spawn").Pool(writers) as pool:
        won = pool.starmap(_race, [(url, s3_options, writer, keys) for writer in range(writers)])
    assert sorted(key for keys_won in won for key in keys_won) == list(range(keys))


class StoreAgainstADictionary(RuleBasedStateMachine):
    """Local and memory stores behave as one dictionary of keys that are never prefixes of one another."""

    keys = st.sampled_from(["a/x", "a/y", "b/c/x", "b/c/y", "b/d", "e"])
    prefixes = st.sampled_from(["a", "b", "b/c", "e"])

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        inside = [ObjectStore(f"{scheme}://{uuid.uuid4().hex}") for scheme in ("memory", "held")]
        self.stores = [ObjectStore(self.folder.name), *inside]
        self.model: dict[str, bytes] = {}

    @rule(key=keys, data=st.binary(max_size=20))
    def put(self, key: str, data: bytes) -> None:
        for store in self.stores:
            store.put(key, data)
        self.model[key] = data

    @rule(key=keys, data=st.binary(max_size=20))
    def create(self, key: str, data: bytes) -> None:
        for store in self.stores:
            assert store.create(key, data) == (key not in self.model)
        self.model.setdefault(key, data)

    @rule(prefix=st.one_of(keys, prefixes))
    def delete(self, prefix: str) -> None:
        for store in self.stores:
            store.delete(prefix)
        for key in [key for key in self.model if f"{key}/".startswith(f"{prefix}/")]:
            del self.model[key]

    @rule(doomed=st.lists(keys))
    def delete_many(self, doomed: list[str]) -> None:
        for store in self.stores:
            store.delete_many(doomed)
        for key in doomed:
            self.model.pop(key, None)

    @invariant()
    def agree(self) -> None:
        for store in self.stores:
            assert store.list() == sorted(self.model)
            assert store.get_many(list(self.model)) == list(self.model.values())
            assert store.list("b") == sorted(key for key in self.model if key.startswith("b/"))
            assert (
                {key.split("/")[0] for key in self.model if "/" in key} <= set(store.folders()) <= {"a", "b"}
            )
            for key in ("a/x", "e"):
                assert store.exists(key) == (key in self.model)

    def teardown(self) -> None:
        self.folder.cleanup()


TestStoreAgainstADictionary = StoreAgainstADictionary.TestCase
TestStoreAgainstADictionary.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


@given(st.text(max_size=12))
def test_any_text_is_a_key_that_stays_inside_or_a_value_error(text: str) -> None:
    store = ObjectStore(f"memory://{uuid.uuid4().hex}")
    try:
        store.put(text, b"x")
    except ValueError:
        return
    assert store.list() == [text]


@pytest.mark.slow
def test_a_store_whose_server_is_gone_is_one_typed_error_of_the_connection() -> None:
    pytest.importorskip("s3fs")
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "key", "secret": "secret"}
    with pytest.raises(UnreachableStore, match=r"tutti/run: .*http://127.0.0.1:9") as caught:
        ObjectStore("s3://tutti/run", options).get("a")
    assert isinstance(caught.value, ConnectionError)
