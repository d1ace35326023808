"""Simulations of several candidates at a time, each in a process of its own."""

import asyncio
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from types import TracebackType

from infra.virtual_time import StandStill
from tasks.campaign import Campaign, CampaignError
from tasks.simulation.cluster import ClusterConfig, ClusterError
from tasks.simulation.what_if.predict import predict
from tasks.simulation.what_if.prediction import Prediction
from tasks.simulation.what_if.question import reason


def outcome(
    campaign: Campaign,
    cluster: ClusterConfig,
    steps: int,
    warm_up: int | None = None,
    folder: Path | None = None,
) -> Prediction | str:
    """The prediction, or why the candidate cannot run."""
    try:
        return predict(campaign, cluster, steps=steps, warm_up=warm_up, folder=folder)
    except (CampaignError, ClusterError, StandStill) as error:
        return reason(error)


def _processes(count: int) -> ProcessPoolExecutor:
    if "forkserver" not in get_all_start_methods():
        return ProcessPoolExecutor(count, mp_context=get_context("spawn"))
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # what takes seconds to import is imported once for all
    return ProcessPoolExecutor(count, mp_context=context)


class Simulations:
    """With one process they run in this one, beside the event loop; with more in others, which are started
    with the first simulation and end with the block."""

    def __init__(self, processes: int):
        self._pool = _processes(processes) if processes > 1 else None
        self._room = asyncio.Semaphore(processes)

    async def run(
        self,
        campaign: Campaign,
        cluster: ClusterConfig,
        steps: int,
        warm_up: int | None = None,
        folder: Path | None = None,
    ) -> Prediction | str:
        """The prediction, or why the candidate cannot run."""
        asked = (campaign, cluster, steps, warm_up, folder)
        async with self._room:
            if self._pool is None:
                return await asyncio.to_thread(outcome, *asked)
            return await asyncio.get_running_loop().run_in_executor(self._pool, outcome, *asked)

    def __enter__(self) -> "Simulations":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
