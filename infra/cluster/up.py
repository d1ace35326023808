"""Bring a local cluster up, and take it down. Every process is recorded as soon as it exists."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from infra.cluster import parts
from infra.cluster.config import POOLS, QUEUES, ClusterConfig
from infra.cluster.parts import BUCKET, Part
from infra.cluster.ports import LOOPBACK, answers, with_free_ports
from infra.cluster.postgres import as_user, postgres
from infra.cluster.state import MARK, ClusterState
from infra.cluster.work_pools import make_work_pools
from infra.processes import tail

LOGS = "logs"


class ClusterFailed(RuntimeError):
    """The cluster did not come up, or is up already, or cannot be taken down."""


async def bring_up(config: ClusterConfig) -> ClusterState:
    """Start every part and return once the cluster serves. What had started is stopped when one part fails.

    Raises `ClusterFailed`, `PartMissing`, `PortTaken` or `PostgresFailed`.
    """
    config = config.model_copy(update={"folder": config.folder.resolve()})
    (config.folder / LOGS).mkdir(parents=True, exist_ok=True)
    previous = ClusterState.read(config.folder)
    if previous is not None and previous.running():
        raise ClusterFailed(f"a cluster runs in {config.folder}, or its remains do: make down")
    state = ClusterState(config.folder)
    state.save()
    try:
        await _Starting(config, state).run()
    except BaseException:
        await asyncio.to_thread(take_down, config.folder)
        raise
    return state


class _Starting:
    def __init__(self, config: ClusterConfig, state: ClusterState):
        self._config = config
        self._state = state
        self._ports = with_free_ports(config.ports)
        self._api = f"http://{LOOPBACK}:{self._ports.prefect}/api"
        self._environment = {MARK: state.mark, **parts.s3_environment(self._ports)}

    async def run(self) -> None:
        config, ports = self._config, self._ports
        s3 = parts.seaweed(config, ports, self._environment)
        scheduler = parts.dask_scheduler(ports)
        store = parts.mooncake(config, ports)
        database_url = None
        if config.postgres:
            database, database_url = await asyncio.to_thread(postgres, config, ports)
            await self._serving(database)
        server = parts.prefect_server(config, ports, database_url)
        first = [server, s3, scheduler, *([store] if store is not None else [])]
        await asyncio.gather(*(self._serving(part) for part in first))
        self._environment |= {
            "PREFECT_API_URL": self._api,
            "PREFECT_HOME": str(config.folder / "prefect"),
            "PREFECT_CLIENT_MAX_RETRIES": "10",
            "TUTTI_DASK_SCHEDULER": f"tcp://{LOOPBACK}:{ports.dask}",
        }
        self._state.urls |= {
            "PREFECT_API_URL": self._api,
            "dashboard": f"http://{LOOPBACK}:{ports.prefect}",
            "s3": f"s3://{BUCKET} at http://{LOOPBACK}:{ports.s3}",
            "dask": f"tcp://{LOOPBACK}:{ports.dask}",
        }
        if store is not None:
            self._state.urls["weights"] = f"mooncake://{LOOPBACK}:{ports.mooncake}"
        self._state.save()
        workers = [parts.dask_worker(config, ports, index) for index in range(config.dask_workers)]
        await asyncio.gather(
            self._make_bucket(),
            make_work_pools(self._api, POOLS, QUEUES),
            *(self._serving(worker) for worker in workers),
        )
        await asyncio.gather(*(self._serving(parts.prefect_worker(pool)) for pool in POOLS))
        if config.deploy:
            await self._finished("deploy", parts.prefect("--no-prompt", "deploy", "--all"))

    async def _serving(self, part: Part) -> None:
        process = self._spawn(part)
        if part.port is None:
            return
        try:
            async with asyncio.timeout(self._config.start_limit_s):
                while not await answers(part.port):
                    if process.poll() is not None:
                        raise ClusterFailed(f"{part.name} ended; its log:\n{tail(self._log(part.name))}")
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise ClusterFailed(
                f"{part.name} did not serve within --start-limit-s ({self._config.start_limit_s} s); "
                f"its log:\n{tail(self._log(part.name))}"
            ) from None

    def _spawn(self, part: Part) -> "subprocess.Popen[bytes]":
        self._state.files += part.files
        # Opened for both by the part itself, so that its life line never ends: `down` ends it by its id.
        stdin: int = subprocess.DEVNULL
        if part.settings is not None:
            fifo = self._config.folder / f"{part.name}.settings"
            fifo.unlink(missing_ok=True)
            os.mkfifo(fifo, 0o600)
            stdin = os.open(fifo, os.O_RDWR)
            os.write(stdin, json.dumps(part.settings).encode() + b"\n")
        with self._log(part.name).open("ab") as log:
            process = subprocess.Popen(
                part.command,
                stdin=stdin,
                stdout=log,
                stderr=log,
                cwd="/" if part.user else None,
                env={**os.environ, **self._environment, **part.environment},
                start_new_session=True,
                **as_user(part.user),
            )
        if stdin >= 0:
            os.close(stdin)
        self._state.record(part.name, process.pid)
        return process

    async def _finished(self, name: str, command: list[str]) -> None:
        process = self._spawn(Part(name, command))
        if await asyncio.to_thread(process.wait, self._config.start_limit_s) != 0:
            raise ClusterFailed(f"{name} failed; its log:\n{tail(self._log(name))}")

    async def _make_bucket(self) -> None:
        """SeaweedFS answers before its S3 service takes requests, so this is tried until it works."""
        script = (
            "import s3fs, sys, time\n"
            "for attempt in range(60):\n"
            "    try:\n"
            f"        s3fs.S3FileSystem(skip_instance_cache=True).mkdir({BUCKET!r}); break\n"
            "    except FileExistsError: break\n"
            "    except OSError as error: problem = error; time.sleep(0.5)\n"
            "else: sys.exit(f'{problem}')\n"
        )
        await self._finished("s3-bucket", [sys.executable, "-c", script])

    def _log(self, name: str) -> Path:
        return self._config.folder / LOGS / f"{name}.log"


def take_down(folder: Path, *, keep_data: bool = False) -> None:
    """End every process of the cluster in this folder and remove its files but the logs.

    `keep_data` leaves Prefect's database and what lies in S3. Nothing to do is no error. Raises
    `ClusterFailed` when a process would not end; the state then stays, so that it can be tried again.
    """
    folder = folder.resolve()
    state = ClusterState.read(folder)
    if state is None:
        return
    remaining = state.stop()
    if remaining:
        raise ClusterFailed(f"processes {remaining} would not end")
    for left in state.files:
        Path(left).unlink(missing_ok=True)
    kept = {LOGS, *(("prefect", "s3", "postgres", "postgres.password") if keep_data else ())}
    for path in folder.iterdir():
        if path.name in kept:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def describe(folder: Path) -> Mapping[str, str]:
    """Each recorded part and whether it runs; then where to find what."""
    state = ClusterState.read(folder.resolve())
    if state is None:
        return {}
    running = {item.name: "runs" if item.find() is not None else "has ended" for item in state.processes}
    return {**running, **state.urls}
