"""The environment side of a run: a Dask cluster on which members of groups run.

A Dask task carries the members of one group that start together; each of them is announced as soon as it
ends, over Dask's own event stream, so none waits for its siblings. A task that is lost with its worker ends
its members with a fault, and the control plane decides whether to try them again.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from distributed import Client, Future, LocalCluster, wait

from infra.clock import now
from infra.launcher import Launcher, Service
from tasks.environment.abandoned import end_environments_with
from tasks.environment.config import EnvironmentConfig
from tasks.environment.headers import fault_header
from tasks.environment.local_cluster import end_tree, start_local_cluster, worker_processes
from tasks.environment.worker import close_worker, reward_usage, run_members
from tasks.trajectory import MemberSpec, TrajectoryHeader, TrajectoryKey

logger = logging.getLogger(__name__)

_CLOSED_EVERY_S = 0.2
_RESTART_LIMIT_S = 180.0
_STOP_LIMIT_S = 10.0
Listener = Callable[[TrajectoryHeader], None]


class Environments(Protocol):
    """The environment side of a run, as the control plane needs it."""

    name: str

    def connect(self, settings: dict[str, Any]) -> None:
        """Name the services that members will use: settings of `tasks.environment.worker.run_members`."""

    def submit(self, members: list[MemberSpec], listener: Listener) -> None:
        """Run these members of a group; `listener` hears of each one's end, exactly once."""

    async def alive(self) -> None:
        """Return once it has given a sign of life."""

    async def wait_failed(self) -> str:
        """Return why, once it is lost."""

    async def reward_usage(self) -> dict[str, dict[str, float]]:
        """What rewards have taken so far (`RewardUsage`), by environment worker."""

    async def stop(self) -> None: ...


class NoEnvironments(RuntimeError):
    """There is no Dask worker to run environments on."""


class EnvironmentCluster:
    """Runs members and tells each one's listener of its end, exactly once."""

    def __init__(
        self,
        client: Client,
        cluster: LocalCluster | None,
        service: Service | None,
        scheduler: str | None = None,
    ):
        """`scheduler` is the address of one that was there before the run."""
        self.name = f"the Dask scheduler {scheduler}" if scheduler else "the environments' Dask cluster"
        self._client = client
        self._cluster = cluster
        self._service = service
        self._worker_seen = now()
        self._settings: dict[str, Any] = {}
        self._listeners: dict[TrajectoryKey, tuple[Listener, MemberSpec]] = {}
        self._watching: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()

    @classmethod
    async def start(
        cls,
        config: EnvironmentConfig,
        group_members: int,
        launcher: Launcher,
        logs: Path,
        silence_limit_s: float = 60.0,
    ) -> "EnvironmentCluster":
        """Connect to `config.scheduler`; without one, start a cluster here or on the environment pool's host.

        `group_members` is the number of members that one Dask task carries. A worker of a cluster started
        here that gives no sign of life for `silence_limit_s` is restarted, and its tasks are run again.
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
                {
                    "config": config.model_dump(mode="json"),
                    "group_members": group_members,
                    "silence_limit_s": silence_limit_s,
                },
                logs / "environments.log",
            )
            address = service.url
        else:
            address = cluster = await start_local_cluster(config, group_members, silence_limit_s)
        client = await Client(address, asynchronous=True)
        if config.scheduler is not None:
            await end_environments_with(client)
        return cls(client, cluster, service, config.scheduler)

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

    async def alive(self) -> None:
        """Return once the scheduler has answered. Raises `NoEnvironments` when it has no worker; a nanny of a
        cluster started here is given time to start its worker again first."""
        if self._cluster is not None:
            if self._cluster.scheduler.workers:
                self._worker_seen = now()
            elif now() - self._worker_seen > _RESTART_LIMIT_S:
                raise NoEnvironments(f"no Dask worker could be started again in {_RESTART_LIMIT_S:g} s")
            return
        # What the client keeps of the scheduler may be seconds old; this asks it.
        workers = (await self._client.scheduler.identity())["workers"]
        if not workers:
            raise NoEnvironments("the Dask scheduler has no worker")

    async def wait_failed(self) -> str:
        """Return why, once the scheduler is gone."""
        if self._service is not None:
            return await self._service.ended()
        if self._cluster is None:
            comm = self._client.scheduler_comm.comm
            while not comm.closed():  # noqa: ASYNC110, for the comm tells nobody
                await asyncio.sleep(_CLOSED_EVERY_S)
            return "its connection closed"
        await asyncio.Event().wait()  # it is part of this process
        raise AssertionError

    async def reward_usage(self) -> dict[str, dict[str, float]]:
        """What rewards have taken so far (`RewardUsage`), by Dask worker; those without any are left out."""
        answers = await self._client.run(reward_usage, on_error="ignore")
        return {worker: answer for worker, answer in answers.items() if answer is not None}

    async def stop(self) -> None:
        """Ends the environments; worker processes of a cluster of this process also when they are frozen."""
        # A nanny that is starting a worker, and a client that looks for its scheduler, call the end of that
        # an error, with its stack.
        for speaker in ("distributed.nanny", "distributed.client"):
            logging.getLogger(speaker).setLevel(logging.CRITICAL)
        self._listeners.clear()
        for watching in self._watching:
            watching.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        processes = [] if self._cluster is None else worker_processes(self._cluster)
        try:
            if self._cluster is not None:
                await _within(_STOP_LIMIT_S, self._client.run(close_worker, on_error="return"))
            # A client whose scheduler is gone would try to reach it first.
            gone = self._client.scheduler_comm is None or self._client.scheduler_comm.comm.closed()
            await _within(_STOP_LIMIT_S, self._client.close(timeout=1 if gone else 5))
            if self._cluster is not None:
                closing: Awaitable[Any] | None = self._cluster.close()
                assert closing is not None  # an asynchronous cluster's
                await _within(_STOP_LIMIT_S, closing)
        finally:
            for process in processes:
                end_tree(process)
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


async def _within(limit_s: float, closing: Awaitable[Any]) -> None:
    """Wait for a part of the stop, but not for ever: what it asks may be frozen."""
    try:
        async with asyncio.timeout(limit_s):
            await closing
    except Exception as problem:  # the environments end by force next
        logger.warning("the Dask cluster does not end as it should: %s: %s", type(problem).__name__, problem)
