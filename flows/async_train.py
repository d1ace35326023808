"""The long-running training flow: RollArt's six-step protocol, each step a task run in the dashboard."""

import logging
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.observation import observed
from flows.pools import check_pools
from flows.preparation import open_run, prepare_model
from flows.results import JSON
from tasks.campaign import Campaign
from tasks.session import current_session
from tasks.train.loop import Stage, train_loop
from tasks.train.manifests import BatchManifest


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

_STAGES: dict[Stage, Any] = {
    "get_batch": get_batch,
    "suspend": suspend,
    "update": update,
    "resume": resume,
    "recompute": recompute,
    "train_step": train_step,
}


async def as_task_run(stage: Stage, *arguments: Any) -> Any:
    """Perform a stage as a Prefect task run: of this flow run, or of the host's that carries it out."""
    task_of_stage = _STAGES[stage]
    if current_session().launcher.runs_stages and stage != "get_batch":
        return await task_of_stage.fn(*arguments)
    return await task_of_stage(*arguments)


@flow(name="async-train", log_prints=True, persist_result=False, result_serializer=JSON)
async def async_train(campaign: Campaign, run: str) -> int:
    """Train a run to its campaign's last step, from its newest checkpoint. Returns the version reached."""
    await check_pools(campaign)
    folder = open_run(campaign, run)
    await prepare_model(campaign, folder)
    async with observed(campaign, folder) as session:
        await train_loop(session, as_task_run)
        return session.step
