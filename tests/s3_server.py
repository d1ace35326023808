"""A real S3 server, SeaweedFS's `weed`, that takes only the credentials it was started with."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUCKET = "tutti"


@dataclass(frozen=True, slots=True)
class S3Server:
    endpoint: str
    key: str
    secret: str

    @property
    def options(self) -> dict[str, Any]:
        """Options of s3fs."""
        return {"endpoint_url": self.endpoint, "key": self.key, "secret": self.secret}

    @property
    def environment(self) -> dict[str, str]:
        """What botocore reads."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


def find_weed() -> str | None:
    beside_python = Path(sys.executable).parent
    return shutil.which("weed", path=f"{beside_python}{os.pathsep}{os.environ.get('PATH', '')}")


@contextmanager
def s3_server(weed: str, folder: Path) -> Iterator[S3Server]:
    """Serve from `folder`, with the bucket `tutti` in it."""
    import s3fs

    ports = {name: _free_port() for name in ("master.port", "volume.port", "filer.port", "s3.port")}
    server = S3Server(
        f"http://127.0.0.1:{ports['s3.port']}", f"key{secrets.token_hex(6)}", secrets.token_hex(16)
    )
    credentials = {"accessKey": server.key, "secretKey": server.secret}
    identity = {"name": "tests", "credentials": [credentials], "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                weed,
                "server",
                f"-dir={folder / 'data'}",
                "-s3",
                f"-s3.config={folder / 'identities.json'}",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
                "-master.volumeSizeLimitMB=64",
                "-master.telemetry=false",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                *(f"-{name}={port}" for name, port in ports.items()),
            ],
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", ports["s3.port"]), timeout=5).close()
                s3fs.S3FileSystem(**server.options, skip_instance_cache=True).mkdir(BUCKET)
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.5)
        yield server
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    # weed takes port + 10000 for gRPC, so keep low ones.
    for port in range(21000, 29000):
        if port in _taken:
            continue
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
        _taken.add(port)
        return port
    raise OSError("no free port")


_taken: set[int] = set()
