"""One RL step as a DAG: rollout, environment and reward side by side, then train.

The stages of a step are not barriers: while the engines generate, environments step and finished
trajectories are scored, each on its own hardware. A stage's task run lasts as long as the step needs it, and
returns what it did.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.observation import observed
from flows.pools import check_pools
from flows.preparation import open_run, prepare_model
from flows.results import JSON
from tasks.campaign import Campaign
from tasks.session import current_session
from tasks.train.manifests import BatchManifest


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="rollout {step}")
async def rollout(step: int) -> dict[str, Any]:
    """Serve generation until the batch is there; returns the engines' counters for this step."""
    session = current_session()
    before = await session.fleet.counters()
    await session.batch_ready(step)
    after = await session.fleet.counters()
    return {name: value - before[name] for name, value in after.items()}


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="environment {step}")
async def environment(step: int) -> dict[str, Any]:
    """Run episodes until the batch is there; returns turns and ends of trajectories."""
    counts = (await current_session().batch_ready(step)).counts
    return {name: value for name, value in counts.items() if name.startswith(("outcomes/", "rollout/"))}


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="reward {step}")
async def reward(step: int) -> BatchManifest:
    """Score every trajectory that ends, until the batch is there; returns it, committed."""
    return await current_session().batch_ready(step)


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="train {step}")
async def train(step: int, batch: BatchManifest) -> dict[str, Any]:
    """Train on the batch and publish the new version."""
    session = current_session()
    row = await session.train_step(batch)
    await session.pushed()
    return row


@flow(name="rl-step", log_prints=True, persist_result=False, result_serializer=JSON)
async def rl_step(campaign: Campaign, run: str) -> Mapping[str, Any]:
    """Take the run's next step from its newest checkpoint, on policy. Returns the step's metrics."""
    await check_pools(campaign)
    folder = open_run(campaign, run)
    await prepare_model(campaign, folder)
    async with observed(campaign, folder) as session:
        step = session.step
        await session.begin()
        if session.launcher.runs_stages:  # the pools' hosts make the stages' task runs
            return await train.fn(step, await session.get_batch(step))
        _, _, batch = await asyncio.gather(rollout(step), environment(step), reward(step))
        return await train(step, batch)
