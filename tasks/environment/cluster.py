"""The environment side of a run: a Dask cluster on which members of groups run.

A Dask task carries the members of one group that start together; each of them is announced as soon as it
ends, over Dask's own event stream, so none waits for its siblings. A task that is lost with its worker ends
its members with a fault, and the control plane decides whether to try them again.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

import dask
from distributed import Client, Future, LocalCluster, wait

from tasks.environment.config import EnvironmentConfig
from tasks.environment.headers import fault_header
from tasks.environment.worker import close_worker, run_members
from tasks.trajectory import MemberSpec, TrajectoryHeader, TrajectoryKey

logger = logging.getLogger(__name__)

Listener = Callable[[TrajectoryHeader], None]


class EnvironmentCluster:
    """Runs members and tells each one's listener of its end, exactly once."""

    def __init__(self, client: Client, cluster: LocalCluster | None):
        self._client = client
        self._cluster = cluster
        self._settings: dict[str, Any] = {}
        self._listeners: dict[TrajectoryKey, tuple[Listener, MemberSpec]] = {}
        self._watching: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()

    @classmethod
    async def start(cls, config: EnvironmentConfig, group_members: int) -> "EnvironmentCluster":
        """Start a local cluster, or connect to `config.scheduler`.

        `group_members` is the number of members that one Dask task carries.
        """
        cluster = None
        if config.scheduler is None:
            slots = -(-config.concurrent_trajectories // group_members)
            settings = {
                "distributed.worker.memory.terminate": False,
                "distributed.admin.event-loop": "uvloop",
            }
            with dask.config.set(settings):
                cluster = await LocalCluster(
                    n_workers=config.workers,
                    threads_per_worker=slots,
                    processes=True,
                    host="127.0.0.1",
                    dashboard_address="127.0.0.1:0",
                    asynchronous=True,
                    memory_limit=0,
                    silence_logs=logging.ERROR,
                    env={
                        "OMP_NUM_THREADS": "1",
                        "TOKENIZERS_PARALLELISM": "false",
                        "DASK_LOGGING__DISTRIBUTED": "error",
                    },
                )
        client = await Client(cluster or config.scheduler, asynchronous=True)
        return cls(client, cluster)

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
