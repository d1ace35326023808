"""The campaign's plan as a stage of its flow: simulated before anything is started, shown, and heeded."""

import asyncio

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.campaign import Campaign
from tasks.report.artifacts import CampaignArtifacts
from tasks.report.plan_section import plan_markdown, read_plan, write_plan
from tasks.run_folder import RunFolder
from tasks.simulation.what_if.plan import Plan, make_plan
from tasks.simulation.what_if.plan_config import PlanConfig


@task(name="plan", cache_policy=NO_CACHE, persist_result=False)
async def plan_campaign(campaign: Campaign, plan: PlanConfig, folder: RunFolder) -> str:
    """Simulate the campaign and keep the prediction as the run's `plan.json`; one that is there stays.

    Returns the prediction in a line. Raises `PlanRefused` where a limit of the plan is not kept.
    """
    known = read_plan(folder.root)
    if known is None:
        made = await asyncio.to_thread(make_plan, campaign, plan)
        write_plan(folder.root, made.model_dump(mode="json"))
        if campaign.trackers.prefect_artifacts:
            artifacts = CampaignArtifacts(campaign.name, campaign.train.steps)
            await artifacts.plan(plan_markdown(made.model_dump(mode="json")))
    else:
        made = Plan.model_validate(known)
    made.require(plan)
    found = made.prediction
    costs = f"{found.step_seconds:.3g} s and {found.usd_per_step:.3g} USD"
    return f"{costs} a step predicted on cluster {made.cluster}"
