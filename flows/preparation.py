"""What every flow does first: find or begin the run's folder, and prepare its model."""

from datetime import datetime
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from flows.stores import reach_stores
from infra.processes import ServiceProcess
from tasks.campaign import Campaign, CampaignError
from tasks.reward.lithops_service import ServerlessError, lithops_config
from tasks.rollout.affinity import requested_affinity
from tasks.rollout.config import EngineUnavailable
from tasks.run_folder import RunFolder
from tasks.simulation.what_if.plan import require_plan


def new_run_name(campaign: Campaign) -> str:
    return f"{campaign.name}-{datetime.now():%Y%m%d-%H%M%S}"


def require_parts(campaign: Campaign) -> None:
    """Ask stores, engines and function services whether they are there, before anything starts.

    Raises `CampaignError` that names the option to change. What runs on other machines is asked there.
    """
    reach_stores(campaign)
    requested_affinity(campaign)
    if campaign.plan is not None:
        require_plan(campaign, campaign.plan)
    try:
        if campaign.pools is None:
            campaign.rollout.engine.require_available()
        serverless = campaign.reward.serverless
        if serverless is not None and serverless.block is None and campaign.environment.scheduler is None:
            lithops_config(serverless, {})
    except (EngineUnavailable, ServerlessError) as error:
        raise CampaignError(str(error)) from None


def open_run(campaign: Campaign, run: str) -> RunFolder:
    """The folder of this run, begun if there is none yet, with its stores within reach.

    Raises `CampaignError`.
    """
    require_parts(campaign)
    folder = RunFolder.of(campaign, run)
    folder.begin(campaign, resume=folder.exists())
    return folder


@task(name="prepare_model", cache_policy=NO_CACHE, persist_result=False)
async def prepare_model(campaign: Campaign, folder: RunFolder) -> dict[str, Any]:
    """Build and warm up the model in a process of its own, unless the run already has it."""
    process = await ServiceProcess.start(
        "prepare",
        "tasks.model.prepare",
        {"campaign": campaign.model_dump(mode="json"), "model": str(folder.model)},
        Path(folder.logs) / "prepare.log",
        environment={"OMP_NUM_THREADS": "2"},
        start_limit_s=3600,
    )
    await process.stop()
    return process.ready
