"""The environment side of a run: a Dask cluster on which members of groups run.

A Dask task carries the members of one group that start together; each of them is announced as soon as it
ends, over Dask's own event stream, so none waits for its siblings. A task that is lost with its worker ends
its members with a fault, and the control plane decides whether to try them again.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed import Client, Future, LocalCluster, wait

from infra.launcher import Launcher, Service
from tasks.environment.abandoned import end_environments_with
from tasks.environment.config import EnvironmentConfig
from tasks.environment.headers import fault_header
from tasks.environment.local_cluster import start_local_cluster
from tasks.environment.worker import close_worker, run_members
from tasks.trajectory import MemberSpec, TrajectoryHeader, TrajectoryKey

logger = logging.getLogger(__name__)

Listener = Callable[[TrajectoryHeader], None]


class EnvironmentCluster:
    """Runs members and tells each one's listener of its end, exactly once."""

    def __init__(self, client: Client, cluster: LocalCluster | None, service: Service | None):
        self._client = client
        self._cluster = cluster
        self._service = service
        self._settings: dict[str, Any] = {}
        self._listeners: dict[TrajectoryKey, tuple[Listener, MemberSpec]] = {}
        self._watching: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()

    @classmethod
    async def start(
        cls, config: EnvironmentConfig, group_members: int, launcher: Launcher, logs: Path
    ) -> "EnvironmentCluster":
        """Connect to `config.scheduler`; without one, start a cluster here or on the environment pool's host.

        `group_members` is the number of members that one Dask task carries.
        """
        cluster, service = None, None
        address: LocalCluster | str
        if config.scheduler is not None:
            address = config.scheduler
        elif launcher.runs_stages:
            service = await launcher.start(
                launcher.pools("environment")[0],
                "environments",
                "tasks.environment.local_cluster",
                {"config": config.model_dump(mode="json"), "group_members": group_members},
                logs / "environments.log",
            )
            address = service.url
        else:
            address = cluster = await start_local_cluster(config, group_members)
        client = await Client(address, asynchronous=True)
        if config.scheduler is not None:
            await end_environments_with(client)
        return cls(client, cluster, service)

    def connect(self, settings: dict[str, Any]) -> None:
        """Name the services that members will use: settings of `tasks.environment.worker.run_members`."""
        self._settings = settings
        self._client.subscribe_topic(settings["topic"], self._on_event)

    def submit(self, members: list[MemberSpec], listener: Listener) -> None:
        """Run these members in one Dask task; `listener` hears of each one's end."""
        for member in members:
            self._listeners[member.key] = (listener, member)
        future = self._client.submit(
            run_members,
            self._settings,
            [member.to_json() for member in members],
            key=f"{members[0].domain}-{members[0].key}-{next(self._numbers)}",
            pure=False,
        )
        watching = asyncio.create_task(self._watch(future, members))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)

    async def stop(self) -> None:
        self._listeners.clear()
        for watching in self._watching:
            watching.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        if self._cluster is not None:
            await self._client.run(close_worker)
        for closing in (self._client.close(), self._cluster.close() if self._cluster else None):
            if closing is not None:
                await closing
        if self._service is not None:
            await self._service.stop()

    def _on_event(self, event: tuple[float, dict[str, Any]]) -> None:
        message = dict(event[1])
        message.pop("worker", None)  # Dask says who spoke
        self._ended(TrajectoryHeader.from_json(message))

    def _ended(self, header: TrajectoryHeader) -> None:
        listened = self._listeners.pop(header.key, None)
        if listened is not None:
            listened[0](header)

    async def _watch(self, future: Future, members: list[MemberSpec]) -> None:
        """Resolve the Dask future; whatever was not announced by then ended with a fault.

        Announcements and the end of the task come over one ordered stream, so the results themselves, which
        say the same, stay where they are.
        """
        error = ""
        try:
            await wait(future)
            if future.status != "finished":
                raise await future.exception()
            if any(member.key in self._listeners for member in members):
                for data in await future.result():
                    self._ended(TrajectoryHeader.from_json(data))
        except asyncio.CancelledError:
            raise
        except Exception as problem:  # whatever the worker raised, or Dask's KilledWorker
            error = f"{type(problem).__name__}: {problem}"
            logger.warning("a Dask task of environments failed: %s", error)
        for member in members:
            if member.key in self._listeners:
                self._ended(fault_header(member, error or "the environment worker did not account for it"))
