"""A whole campaign: prepare the model, evaluate it, train it, evaluate it again, write the report."""

import argparse
import asyncio
import os
import sys
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.async_train import async_train
from flows.evaluate import evaluate
from flows.observation import observed, unreported
from flows.plan import plan_campaign
from flows.pools import PoolUnavailable, check_pools
from flows.preparation import new_run_name, open_run, prepare_model, require_parts
from flows.results import JSON, kept_results
from tasks.campaign import Campaign, CampaignError
from tasks.report.artifacts import CampaignArtifacts
from tasks.report.evaluation_table import format_evaluation
from tasks.report.html import write_report
from tasks.report.plan_section import plan_markdown, read_plan
from tasks.report.run_files import RunFiles
from tasks.run_folder import RunFolder
from tasks.simulation.what_if.plan import PlanRefused
from tasks.supervision import PartLost, lost_part
from tasks.train.lease import LeaseRefused

LOST = 3
"""Exit status of a run that lost a part and can be resumed."""


@task(name="report", cache_policy=NO_CACHE, persist_result=False)
async def report(campaign: Campaign, folder: RunFolder) -> str:
    """The run's HTML report, and its figures as artifacts."""
    files = RunFiles(folder.root)
    path = await asyncio.to_thread(write_report, folder.root)
    if campaign.trackers.prefect_artifacts:
        artifacts = CampaignArtifacts(campaign.name, campaign.train.steps)
        await artifacts.evaluation(files.read_evaluation() or {})
        await artifacts.finish(files.read_metrics(), path, files.read_ends())
        plan = read_plan(folder.root)
        if plan is not None:
            await artifacts.plan(plan_markdown(plan, files.read_metrics(), files.read_spans()))
    await asyncio.to_thread(folder.upload)
    return str(path)


@task(name="campaign_result", cache_policy=NO_CACHE, persist_result=False, result_serializer=JSON)
async def campaign_result(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The evaluation, kept as a Prefect result where the campaign's stores are remote."""
    return evaluation


@flow(name="campaign", log_prints=True, persist_result=False, result_serializer=JSON)
async def campaign(campaign: Campaign, run: str | None = None) -> dict[str, Any]:
    """Run a campaign to its end. A run that exists is resumed where it was broken off.

    Returns the evaluation, as in the run's `evaluation.json`.
    """
    await check_pools(campaign)
    folder = open_run(campaign, run or new_run_name(campaign))
    print(f"run {folder.name} in {folder.location}")
    if campaign.plan is not None:
        print(f"plan: {await plan_campaign(campaign, campaign.plan, folder)}")
    print(f"model: {await prepare_model(campaign, folder)}")
    files = RunFiles(folder.root)
    settings = {"temperature": campaign.rollout.evaluation_temperature}
    async with observed(campaign, folder) as session:
        untrained = files.read_untrained()
        if untrained is None and session.step == 0:
            untrained = await evaluate(campaign, folder.name)
            files.write_evaluation(untrained, {}, **settings)
        await async_train(campaign, folder.name)
        trained = await evaluate(campaign, folder.name)
        evaluation = files.write_evaluation(untrained or {}, trained, **settings)
    if campaign.trackers.report:
        await report(campaign, folder)
    kept = campaign_result.with_options(**await kept_results(folder))
    written: dict[str, Any] = await kept(evaluation)
    return written


async def _to_its_end(loaded: Campaign, run: str, again: str) -> dict[str, Any]:
    """The campaign's evaluation. Without the Prefect server this process ends here, once the run has."""
    told: asyncio.Future[PartLost] = asyncio.get_running_loop().create_future()
    unreported.set(told)
    running: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(campaign(loaded, run))
    both: set[asyncio.Future[Any]] = {running, told}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if told.done():
        print(f"{told.result()}\n{again}", file=sys.stderr, flush=True)
        os._exit(LOST)
    return await running


def main() -> int:
    """`python -m flows.campaign FILE [option=value ...] [--run NAME] [--resume]`

    Exit status: 2 for a campaign that cannot start, `LOST` for a run that lost a part.
    """
    parser = argparse.ArgumentParser(description="Run a campaign.")
    parser.add_argument("file", help="campaign file")
    parser.add_argument("overrides", nargs="*", metavar="option=value", help="e.g. train.steps=10")
    parser.add_argument("--run", help="name of the run's folder; a new one by default")
    parser.add_argument("--resume", action="store_true", help="go on with the run named by --run")
    arguments = parser.parse_intermixed_args()
    for service in ("TRIGGERS", "EVENT_PERSISTER"):
        # Prefect's temporary server shares two cores with the training; the dashboard needs neither for runs.
        os.environ.setdefault(f"PREFECT_SERVER_SERVICES_{service}_ENABLED", "false")
    try:
        loaded = Campaign.load(arguments.file, arguments.overrides)
        run = arguments.run or new_run_name(loaded)
        require_parts(loaded)
        folder = RunFolder.of(loaded, run)
        folder.begin(loaded, resume=arguments.resume)
    except CampaignError as error:
        print(error, file=sys.stderr)
        return 2
    again = f"python -m flows.campaign {arguments.file} --run {run} --resume"
    try:
        evaluation = asyncio.run(_to_its_end(loaded, run, again))
    except (LeaseRefused, PoolUnavailable, PlanRefused) as error:
        print(error, file=sys.stderr)
        return 2
    except Exception as error:
        # Prefect may fail itself on the way out, above all where its server is the lost part.
        lost = lost_part(error)
        if lost is None:
            raise
        print(f"{lost}\n{again}", file=sys.stderr)
        return LOST
    print(f"\n{format_evaluation(evaluation)}\n\nevaluation, report and logs: {folder.location}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
