"""Push to and pull from the Mooncake weight store against a raw copy of the same bytes over loopback TCP.

    python -m tests.bench.mooncake_copy

prints one JSON line of bytes/s. Ours moves the buckets as the publisher and the reader do, a few at a time;
the raw copy moves them one after another over one connection. Push goes into memory that was in use before,
pull into new memory, on both sides. They take turns, and the best repeat of each counts: what another process
of the machine took away is no property of either.
"""

import json
import multiprocessing
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from blocks.mooncake import MooncakeObjects
from tasks.weights.config import PublicationConfig
from tasks.weights.reading import overlapped
from tests.bench.rows import Row, at_least
from tests.mooncake import start, stop

BUCKETS, BUCKET_BYTES, REPEATS = 4, 64 * 2**20, 6


def rows() -> list[Row]:
    speeds = measure()
    how = (
        f"{BUCKETS} buckets of {BUCKET_BYTES // 2**20} MiB, one master and store process, TCP; "
        f"in turns, best of {REPEATS} repeats, bytes/s"
    )
    return [
        at_least(f"Mooncake {what} : raw loopback copy", speeds[what], speeds[f"raw {what}"], 0.7, how)
        for what in ("push", "pull")
    ]


def measure() -> dict[str, float]:
    """Bytes/s of push and pull, ours and raw."""
    draw = np.random.default_rng(0)
    buckets = [draw.integers(0, 256, BUCKET_BYTES, dtype=np.uint8) for _ in range(BUCKETS)]
    service, ready = start(segment_gib=1.0)
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    peer = context.Process(target=_raw_peer, args=(child,), daemon=True)
    peer.start()
    try:
        objects = MooncakeObjects.open(f"{ready['url']}/bench")
        connection = socket.create_connection(("127.0.0.1", parent.recv()))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        best: dict[str, float] = {}

        def timed(what: str, work: Callable[[], Any]) -> None:
            started = time.perf_counter()
            work()
            speed = BUCKETS * BUCKET_BYTES / (time.perf_counter() - started)
            best[what] = max(best.get(what, 0.0), speed)

        threads = PublicationConfig().threads
        for repeat in range(REPEATS + 1):
            keys = [f"v{repeat}/a/{number}" for number in range(BUCKETS)]

            def put(job: tuple[str, np.ndarray]) -> None:
                objects.put(job[0], job[1].data)

            jobs = list(zip(keys, buckets, strict=True))
            timed("push", lambda jobs=jobs: list(overlapped(put, jobs, threads)))
            timed("raw push", lambda: [_raw_push(connection, bucket) for bucket in buckets])
            timed("pull", lambda keys=keys: list(overlapped(lambda key: objects.get_many([key]), keys)))
            timed("raw pull", lambda: [_raw_pull(connection) for _ in range(BUCKETS)])
            objects.delete(f"v{repeat}")
            if repeat == 0:
                best.clear()  # the store process touched its memory for the first time
        connection.close()
        return best
    finally:
        peer.terminate()
        peer.join()
        stop(service)


def _raw_push(connection: socket.socket, bucket: np.ndarray) -> None:
    connection.sendall(b"<")
    connection.sendall(bucket.data)
    assert connection.recv(1) == b"."


def _raw_pull(connection: socket.socket) -> np.ndarray:
    connection.sendall(b">")
    bucket = np.empty(BUCKET_BYTES, np.uint8)
    _receive(connection, bucket)
    return bucket


def _receive(connection: socket.socket, target: np.ndarray) -> None:
    view = memoryview(target.data)
    while view:
        view = view[connection.recv_into(view) :]


def _raw_peer(pipe: Connection) -> None:
    """Takes buckets into memory that is in use, and sends them back one at a time."""
    stored = [np.ones(BUCKET_BYTES, np.uint8) for _ in range(BUCKETS)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        moved = 0
        while command := connection.recv(1):
            moved += 1
            if command == b"<":
                _receive(connection, stored[moved % BUCKETS])
                connection.sendall(b".")
            else:
                connection.sendall(stored[moved % BUCKETS].data)


if __name__ == "__main__":
    print(json.dumps(measure()))
