"""Mooncake as a back end of the weight store: what is there outlives its writer, and failures have a name."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from blocks.mooncake import MooncakeClient, MooncakeObjects, MooncakeSettings, WeightStoreUnavailable
from blocks.mooncake_index import Index, IndexLog
from blocks.weight_store import open_weight_store
from tests.mooncake import fresh_url, skip_without_mooncake, start, stop


def client_of(url: str) -> tuple[MooncakeClient, str]:
    settings, prefix = MooncakeSettings.parse(url)
    return MooncakeClient(settings), prefix


def test_a_url_names_the_master_the_prefix_and_options() -> None:
    settings, prefix = MooncakeSettings.parse(
        "mooncake://lab:50051/runs/a?protocol=rdma&replicas=2", {"host": "n1"}
    )
    assert (settings.master, prefix) == ("lab:50051", "runs/a")
    assert (settings.protocol, settings.replicas, settings.host) == ("rdma", 2, "n1")
    assert MooncakeSettings.parse("mooncake://lab:1")[1] == "tutti"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mooncake://lab/run", "host:port"),
        ("mooncake://lab:1/a/../b?x=1", "x"),
        ("mooncake://lab:1/a*b", "prefix"),
        ("mooncake://lab:1/run?replica=2", "replica"),
        ("mooncake://lab:1/run?replicas=0", "replicas"),
    ],
)
def test_a_wrong_url_names_the_option(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"stores\.weights") as caught:
        MooncakeSettings.parse(url)
    assert message in str(caught.value)


def test_without_a_master_there_is_one_clear_error_soon() -> None:
    skip_without_mooncake()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(
        WeightStoreUnavailable, match=rf"no Mooncake master listens on 127.0.0.1:{port}.*stores\.weights"
    ):
        open_weight_store(f"mooncake://127.0.0.1:{port}/run")
    assert time.monotonic() - started < 30


def test_what_a_process_put_outlives_it_and_a_killed_put_leaves_nothing_unreachable() -> None:
    url = fresh_url()
    program = textwrap.dedent(
        """
        import os, sys
        from blocks.weight_store import open_weight_store
        store = open_weight_store(sys.argv[1])
        store.put_bucket(1, "whole", 0, b"x" * 100_000)
        store.put_manifest(1, b"manifest")
        store.put_bucket(2, "unfinished", 0, b"y" * 100_000)
        os.kill(os.getpid(), 9)
        """
    )
    ended = subprocess.run([sys.executable, "-c", program, url], cwd=os.getcwd(), stderr=subprocess.DEVNULL)
    assert ended.returncode == -signal.SIGKILL
    store = open_weight_store(url)
    assert store.versions() == [1]
    assert store.get_manifest(1) == b"manifest"
    assert bytes(store.get_buckets(1, ["whole/00000.safetensors"])[0]) == b"x" * 100_000
    assert store.incarnations(2) == ["unfinished"]
    store.delete(2)
    assert store.folders() == [1]


def test_writers_of_the_index_lose_nothing_of_one_another() -> None:
    """Each with a client of its own, as in processes of their own."""
    url = fresh_url()

    def write(writer: int) -> None:
        client, prefix = client_of(url)
        log = IndexLog(client, f"{prefix}/index")
        for number in range(12):
            log.change(lambda index, folder=f"v{writer}/{number}": index.with_folder(folder))  # type: ignore[misc]

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    client, prefix = client_of(url)
    expected = frozenset(f"v{writer}/{number}" for writer in range(3) for number in range(12))
    assert IndexLog(client, f"{prefix}/index").read().folders == expected


def test_an_index_whose_writer_died_in_between_goes_on() -> None:
    client, prefix = client_of(fresh_url())
    log = IndexLog(client, f"{prefix}/index")
    for number in range(20):
        log.change(lambda index, number=number: index.with_folder(f"v{number}/a"))  # type: ignore[misc]
    # Dead after its state and before its hint, and once with all hints gone astray.
    client.put(f"{prefix}/index/{21:012d}", Index(frozenset({"v99/a"})).dump("dead"))
    assert log.read().folders == {"v99/a"}
    fresh = IndexLog(client, f"{prefix}/index")
    assert fresh.read().folders == {"v99/a"}
    fresh.change(lambda index: index.with_folder("v100/a"))
    assert log.read().folders == {"v99/a", "v100/a"}


def test_a_full_store_refuses_and_keeps_what_it_has() -> None:
    skip_without_mooncake()
    service, ready = start(segment_gib=0.02)
    try:
        store = open_weight_store(f"{ready['url']}/full")
        kept = [store.put_bucket(1, "a", index, bytes([index]) * 4_000_000) for index in range(3)]
        with pytest.raises(WeightStoreUnavailable, match=r"no room for 9000000 bytes: raise .* segment_gib"):
            store.put_bucket(1, "a", 3, bytes(9_000_000))
        for index, data in enumerate(store.get_buckets(1, kept)):
            assert bytes(data) == bytes([index]) * 4_000_000
        store.delete(1)
        again = store.put_bucket(2, "a", 0, b"z" * 9_000_000)
        assert bytes(store.get_buckets(2, [again])[0]) == b"z" * 9_000_000
        # The store process is gone, and what it held with it: an error, and not other bytes.
        os.kill(ready["pids"][1], signal.SIGKILL)
        with pytest.raises((WeightStoreUnavailable, KeyError)):
            store.get_buckets(2, [again])
    finally:
        stop(service)


def test_keys_that_leave_the_prefix_are_refused() -> None:
    objects = MooncakeObjects.open(fresh_url())
    for key in ("../x", "a//b", "/a", "a/../b", "a/.*", ""):
        for operation in (objects.get, objects.exists, objects.delete, lambda key: objects.put(key, b"x")):
            with pytest.raises(ValueError, match="no key"):
                operation(key)
