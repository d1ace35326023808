"""On a Dask cluster that outlives runs: when a run's client is gone, what it left in the workers ends too."""

import asyncio
from typing import Any

from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin

from tasks.environment.worker import close_worker


class EnvironmentsOfRun(WorkerPlugin):
    """Stands, in each Dask worker, for the environment hosts and reward workers of one client's members."""

    def __init__(self, client: str):
        self.name = f"environments-{client}"

    async def teardown(self, worker: Any) -> None:
        await close_worker()


class EndWithClient(SchedulerPlugin):
    """Takes the `EnvironmentsOfRun` of its client away when that disconnects, by whatever cause."""

    def __init__(self, client: str):
        self.name = f"end-with-{client}"
        self._client = client
        self._ending: set[asyncio.Future[Any]] = set()

    def remove_client(self, scheduler: Any, client: str) -> None:
        if client != self._client:
            return
        scheduler.remove_plugin(name=self.name)
        environments = EnvironmentsOfRun(client).name
        ending = asyncio.ensure_future(scheduler.unregister_worker_plugin(None, environments))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def end_environments_with(client: Client) -> None:
    """What this client's members start in the Dask workers ends with the client's connection."""
    await client.register_plugin(EnvironmentsOfRun(client.id))
    await client.register_plugin(EndWithClient(client.id))
