"""Held-out evaluation of a run's newest weights."""

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.observation import observed
from flows.preparation import open_run, prepare_model
from tasks import evaluation
from tasks.campaign import Campaign
from tasks.report.intervals import Interval
from tasks.session import current_session


@task(name="evaluate_domains", cache_policy=NO_CACHE, persist_result=False)
async def evaluate_domains() -> dict[str, Interval]:
    session = current_session()
    return await evaluation.evaluate(session, session.step)


@flow(name="evaluate", log_prints=True)
async def evaluate(campaign: Campaign, run: str) -> dict[str, Interval]:
    """Mean held-out reward by domain, with its 95 % interval, of the run's newest checkpoint."""
    folder = open_run(campaign, run)
    await prepare_model(campaign, folder)
    async with observed(campaign, folder):
        scores: dict[str, Interval] = await evaluate_domains()
    for domain, score in scores.items():
        print(
            f"{domain}: {score.mean:.3f} [{score.low:.3f}, {score.high:.3f}] over {score.episodes} episodes"
        )
    return scores
