"""The environments' Dask cluster on Slurm: `python -m infra.deploy.slurm.environments --address FILE`.

It runs as long as the cluster is wanted, writes the scheduler's address to FILE (a campaign's
environment.scheduler), keeps `--jobs` Slurm jobs running, and cancels them when it is ended. Needs the
package dask-jobqueue; the jobs are described in jobqueue.yaml beside this file, or another with --config.
"""

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

import yaml

CONFIG = Path(__file__).with_name("jobqueue.yaml")
SLOTS = 32
"""Threads of each Dask worker: groups of trajectories that it holds at a time."""


class BadConfig(ValueError):
    """The configuration file does not describe a Slurm cluster. The message names the key."""


def read_config(path: Path) -> dict[str, Any]:
    """The section jobqueue.slurm of a file. Raises `BadConfig`."""
    data = yaml.safe_load(path.read_text())
    try:
        section: dict[str, Any] = data["jobqueue"]["slurm"]
    except (KeyError, TypeError):
        raise BadConfig(f"{path} has no section jobqueue.slurm") from None
    for name in ("cores", "processes", "memory", "walltime"):
        if not section.get(name):
            raise BadConfig(f"{path}: jobqueue.slurm.{name} is missing")
    return section


def make_cluster(path: Path = CONFIG) -> Any:
    """A `dask_jobqueue.SLURMCluster` without jobs yet. Its scheduler runs in this process, which the section
    configures from now on: the cluster reads it again for each job. Raises `BadConfig`."""
    import dask
    from dask_jobqueue import SLURMCluster

    section = read_config(path)
    dask.config.set({f"jobqueue.slurm.{name}": value for name, value in section.items()})
    return SLURMCluster(
        worker_extra_args=[*section.get("worker-extra-args", []), f"--nthreads={SLOTS}"],
        scheduler_options={"dashboard_address": None, **section.get("scheduler-options", {})},
    )


def run(path: Path, jobs: int, address: Path) -> None:
    """Keep the cluster up until this process is told to end."""
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before other threads are there, which inherit it
    cluster = make_cluster(path)
    try:
        cluster.adapt(minimum_jobs=jobs, maximum_jobs=jobs)
        address.write_text(f"{cluster.scheduler_address}\n")
        print(f"environments: {cluster.scheduler_address}", flush=True)
        signal.sigwait(ends)
    finally:
        address.unlink(missing_ok=True)
        cluster.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="The environments' Dask cluster on Slurm.")
    parser.add_argument("--jobs", type=int, default=1, help="Slurm jobs to keep running")
    parser.add_argument(
        "--address", type=Path, default=Path("environments.address"), help="file to write the address to"
    )
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--script", action="store_true", help="only print the job's script")
    arguments = parser.parse_args()
    try:
        if arguments.script:
            cluster = make_cluster(arguments.config)
            print(cluster.job_script())
            cluster.close()
            return 0
        run(arguments.config, arguments.jobs, arguments.address)
    except BadConfig as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
