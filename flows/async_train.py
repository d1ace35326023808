"""The long-running training loop: RollArt's six-step protocol, each step a task run in the dashboard."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.observation import observed
from flows.pools import check_pools
from flows.preparation import open_run, prepare_model
from flows.results import JSON
from tasks.campaign import Campaign
from tasks.session import Session, current_session
from tasks.train.manifests import BatchManifest
from tasks.train.modes import MODES


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="get_batch {step}")
async def get_batch(step: int) -> BatchManifest:
    return await current_session().get_batch(step)


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="suspend {step}")
async def suspend(step: int) -> None:
    await current_session().suspend(step)


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="update {step}")
async def update(step: int) -> None:
    await current_session().update(step)


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="resume {step}")
async def resume(step: int) -> None:
    await current_session().resume(step)


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="recompute {step}")
async def recompute(step: int) -> int:
    return await current_session().recompute(step)


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="train_step {step}")
async def train_step(step: int, batch: BatchManifest) -> dict[str, Any]:
    return await current_session().train_step(batch)


# Six lines a step of "Finished in state Completed" say nothing that dashboard and progress line do not.
logging.getLogger("prefect.task_runs").setLevel(logging.WARNING)

Call = Callable[..., Awaitable[Any]]


async def as_task_run(stage: Any, *arguments: Any) -> Any:
    """Perform a stage as a Prefect task run: of this flow run, or of the host's that carries it out."""
    if current_session().launcher.runs_stages and stage is not get_batch:
        return await stage.fn(*arguments)
    return await stage(*arguments)


async def directly(stage: Any, *arguments: Any) -> Any:
    """Perform a stage without Prefect, for measuring what Prefect costs."""
    return await stage.fn(*arguments)


async def train_loop(session: Session, call: Call = as_task_run) -> None:
    """Train until the campaign's last step. The same loop for every mode.

    Overlapping modes: the batch of step n is taken while step n - 1 trains; then the engines take version n
    and generate for step n + 1 while the trainer works on step n. Others: the engines take each new version
    before the next batch is begun.
    """
    overlaps = MODES[session.campaign.train.mode].overlaps_training
    training: asyncio.Future[Any] | None = None
    await session.begin()
    for step in range(session.step, session.campaign.train.steps):
        batch = await call(get_batch, step)
        if overlaps:
            if training is not None:
                await training
            await refresh(session, step, call)
            training = asyncio.gather(call(recompute, step), call(train_step, step, batch))
            session.in_background(training)
        else:
            await call(train_step, step, batch)
            await refresh(session, step, call)
            await call(recompute, step)
    if training is not None:
        await training
        await refresh(session, session.step, call)


async def refresh(session: Session, step: int, call: Call) -> None:
    """The engines take the newest weights once these are pushed: suspend, update, resume."""
    await session.pushed()
    await call(suspend, step)
    await call(update, step)
    await call(resume, step)


@flow(name="async-train", log_prints=True, persist_result=False, result_serializer=JSON)
async def async_train(campaign: Campaign, run: str) -> int:
    """Train a run to its campaign's last step, from its newest checkpoint. Returns the version reached."""
    await check_pools(campaign)
    folder = open_run(campaign, run)
    await prepare_model(campaign, folder)
    async with observed(campaign, folder) as session:
        await train_loop(session)
        return session.step
