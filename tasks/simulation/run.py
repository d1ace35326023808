"""Simulates a campaign on a cluster: its own control plane, on a virtual clock."""

import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from infra.clock import now, wall
from infra.virtual_time import VirtualTimeLoop, run_virtual
from tasks.campaign import Campaign
from tasks.simulation.cluster import ClusterConfig, ClusterError
from tasks.simulation.fitting import Fitted, fit
from tasks.simulation.result import SimulationResult, result_of
from tasks.simulation.session import open_simulation
from tasks.simulation.usage import Usage
from tasks.train.loop import directly, train_loop

HORIZON_S = 1e9
"""A simulation in which nothing happens for so long stands still: its heart-beats are further apart."""


def simulate(
    campaign: Campaign,
    cluster: ClusterConfig,
    *,
    folder: Path | None = None,
    warm_up_steps: int = 1,
    cool_down_steps: int = 0,
) -> SimulationResult:
    """Run the campaign's train steps in virtual time.

    Means leave out so many steps at the beginning and at the end. In the first step the engines begin alpha
    batches more than later ones; in the last alpha steps they begin nothing any more. Who wants the steady
    state of a long campaign from a few steps leaves out one at the beginning and alpha at the end.

    With `folder`, the run's files are left there (metrics.jsonl, timeline.jsonl, ends.jsonl, campaign.yaml).
    The same campaign, cluster and seed give the same result, but for `wall_seconds`. Blocks, and may not be
    called on a thread with a running event loop. Raises `ClusterError` before anything is simulated, and
    `infra.virtual_time.StandStill` when the run waits for what will not happen.
    """
    left_out = warm_up_steps + cool_down_steps
    if campaign.train.steps <= left_out:
        raise ClusterError(
            f"train.steps ({campaign.train.steps}) must be above the {left_out} steps of warm-up and "
            "cool-down that are left out: raise train.steps, or leave out fewer"
        )
    fitted = fit(campaign, cluster)
    with ExitStack() as stack:
        root = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tutti-simulation-")))
        began = wall()
        rows, usages, seconds, events = run_virtual(_run(fitted, root), HORIZON_S)
        return result_of(
            cluster,
            rows,
            usages,
            warm_up_steps=warm_up_steps,
            cool_down_steps=cool_down_steps,
            virtual_seconds=seconds,
            wall_seconds=wall() - began,
            events=events,
        )


async def _run(fitted: Fitted, root: Path) -> tuple[list[dict[str, Any]], list[Usage], float, int]:
    rows: list[dict[str, Any]] = []
    usages: list[Usage] = []
    async with open_simulation(fitted, root) as (session, meter):

        async def observe(row: dict[str, Any]) -> None:
            rows.append(row)
            usages.append(await meter.read())

        session.observers.append(observe)
        usages.append(await meter.read())
        await train_loop(session, directly(session))
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return rows, usages, now(), loop.events
