"""What every flow does first: find or begin the run's folder, and prepare its model."""

from datetime import datetime
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.processes import ServiceProcess
from tasks.campaign import Campaign
from tasks.run_folder import RunFolder


def new_run_name(campaign: Campaign) -> str:
    return f"{campaign.name}-{datetime.now():%Y%m%d-%H%M%S}"


def open_run(campaign: Campaign, run: str) -> RunFolder:
    """The folder of this run, begun if there is none yet."""
    folder = RunFolder.of(campaign, run)
    folder.begin(campaign, resume=folder.campaign_file.exists())
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
