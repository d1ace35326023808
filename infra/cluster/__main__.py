"""`python -m infra.cluster up|down|status`: a whole cluster here, for `make up` and `make down`."""

import argparse
import asyncio
import sys
from pathlib import Path

from infra.cluster.config import ClusterConfig, Ports
from infra.cluster.parts import PartMissing
from infra.cluster.ports import PortTaken
from infra.cluster.postgres import PostgresFailed
from infra.cluster.up import ClusterFailed, bring_up, describe, take_down


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.cluster", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ClusterConfig().folder, help="of state, data and logs")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start everything, and return once it serves")
    up.add_argument("--postgres", action="store_true", help="Prefect's database in PostgreSQL, not in SQLite")
    up.add_argument("--postgres-user", default=ClusterConfig().postgres_user)
    up.add_argument("--dask-workers", type=int, default=ClusterConfig().dask_workers)
    up.add_argument("--mooncake-gib", type=float, default=ClusterConfig().mooncake_gib)
    up.add_argument("--start-limit-s", type=float, default=ClusterConfig().start_limit_s)
    up.add_argument("--no-deploy", action="store_true", help="leave prefect.yaml undeployed")
    up.add_argument("--free-ports", action="store_true", help="any free ports, instead of the usual ones")
    for name, port in Ports().model_dump().items():
        up.add_argument(f"--ports.{name}", type=int, default=port, dest=f"port_{name}")
    down = commands.add_parser("down", help="end everything, and remove all files but the logs")
    down.add_argument("--keep-data", action="store_true", help="leave Prefect's database and what is in S3")
    commands.add_parser("status", help="what runs, and where it is found")
    arguments = parser.parse_args()
    try:
        if arguments.command == "up":
            asyncio.run(bring_up(_config(arguments)))
        if arguments.command == "down":
            take_down(arguments.folder, keep_data=arguments.keep_data)
    except (ClusterFailed, PartMissing, PortTaken, PostgresFailed) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing of the cluster is left", file=sys.stderr)
        return 130
    about = describe(arguments.folder)
    for name, value in about.items():
        print(f"{name:20} {value}")
    if "PREFECT_API_URL" in about:
        print(f"\nexport PREFECT_API_URL={about['PREFECT_API_URL']}\nprefect deployment run campaign/pools")
    return 0


def _config(arguments: argparse.Namespace) -> ClusterConfig:
    named = {name: getattr(arguments, f"port_{name}") for name in Ports.model_fields}
    ports = dict.fromkeys(named, 0) if arguments.free_ports else named
    return ClusterConfig(
        folder=arguments.folder,
        ports=Ports(**ports),
        postgres=arguments.postgres,
        postgres_user=arguments.postgres_user,
        dask_workers=arguments.dask_workers,
        mooncake_gib=arguments.mooncake_gib,
        deploy=not arguments.no_deploy,
        start_limit_s=arguments.start_limit_s,
    )


if __name__ == "__main__":
    sys.exit(main())
