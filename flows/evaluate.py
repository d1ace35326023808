"""Held-out evaluation of a run's newest weights."""

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.observation import observed
from flows.pools import check_pools
from flows.preparation import open_run, prepare_model
from flows.results import JSON, kept_results
from tasks import evaluation
from tasks.campaign import Campaign
from tasks.report.intervals import Interval
from tasks.session import current_session


@task(name="evaluate_domains", cache_policy=NO_CACHE, persist_result=False, result_serializer=JSON)
async def evaluate_domains() -> dict[str, Interval]:
    session = current_session()
    return await evaluation.evaluate(session, session.step)


@flow(name="evaluate", log_prints=True, persist_result=False, result_serializer=JSON)
async def evaluate(campaign: Campaign, run: str) -> dict[str, Interval]:
    """Mean held-out reward by domain, with its 95 % interval, of the run's newest checkpoint."""
    await check_pools(campaign)
    folder = open_run(campaign, run)
    await prepare_model(campaign, folder)
    async with observed(campaign, folder):
        kept = evaluate_domains.with_options(**await kept_results(folder))
        scores: dict[str, Interval] = await kept()
    for domain, score in scores.items():
        print(
            f"{domain}: {score.mean:.3f} [{score.low:.3f}, {score.high:.3f}] over {score.episodes} episodes"
        )
    return scores
