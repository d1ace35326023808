"""What a local cluster is made of."""

from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt

from infra.config import Config

POOLS = {
    "compute-gpu": "GPUs strong in compute: prefill, many turns",
    "bandwidth-gpu": "GPUs strong in memory bandwidth: decode, long responses",
    "train-gpu": "GPUs that train",
    "cpu": "CPUs: environments, rewards, and the campaigns themselves",
}
"""Prefect work pools, by kind of hardware. On one machine all of them are this machine."""

QUEUES = {"interactive": 1, "campaigns": 2, "default": 3}
"""Work queues of every pool, with their priorities; 1 goes first."""


class Ports(Config):
    """On loopback. 0 takes a free one."""

    prefect: int = Field(default=4200, ge=0, le=65535)
    s3: int = Field(default=8333, ge=0, le=65535)
    mooncake: int = Field(default=50051, ge=0, le=65535)
    dask: int = Field(default=8786, ge=0, le=65535)
    dask_dashboard: int = Field(default=8787, ge=0, le=65535)
    postgres: int = Field(default=5433, ge=0, le=65535)


class ClusterConfig(Config):
    """One machine's cluster, in one folder."""

    folder: Path = Path(".cluster")
    ports: Ports = Ports()
    postgres: bool = False
    """Keep Prefect's database in a PostgreSQL server of the cluster's own instead of SQLite."""
    postgres_user: str = "postgres"
    """System user that PostgreSQL runs as when the cluster is started by root, which it refuses to be."""
    dask_workers: PositiveInt = 1
    dask_slots: PositiveInt = 32
    """Groups of trajectories that one Dask worker holds at a time."""
    mooncake_gib: PositiveFloat = 1.0
    """Memory of the Mooncake store."""
    deploy: bool = True
    """Deploy what prefect.yaml in the working directory describes."""
    start_limit_s: PositiveFloat = 180.0
    """For each part; more than enough on a machine that is not overloaded."""
