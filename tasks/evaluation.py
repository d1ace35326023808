"""Held-out evaluation through the same proxy, environments and rewards as training."""

import asyncio
import itertools

from tasks.report.intervals import Interval, mean_interval
from tasks.session import Session
from tasks.train.ledger import derived_seed
from tasks.trajectory import MemberSpec, Reward, TrajectoryHeader, TrajectoryKey

_GROUPS_FROM = 90_000_000
"""Evaluation episodes are named above every training group, so that they never meet in the proxy."""
_numbers = itertools.count(_GROUPS_FROM)


async def evaluate(session: Session, step: int) -> dict[str, Interval]:
    """Mean held-out reward of each domain under the weights that the engines serve, with 95 % intervals.

    The episodes' seeds are the same at every call, and training never draws them. An episode that fails is
    tried again as in training; one that fails for good is missing from the interval's `episodes`.
    """
    async with session.span("evaluation", "evaluate", step):
        domains = list(session.campaign.domains)
        intervals = await asyncio.gather(*(_evaluate_domain(session, domain) for domain in domains))
    return dict(zip(domains, intervals, strict=True))


async def _evaluate_domain(session: Session, domain: str) -> Interval:
    evaluation = session.campaign.evaluation
    ended = await asyncio.gather(
        *(_episode(session, domain, evaluation.seed + index) for index in range(evaluation.episodes))
    )
    rewards = [header.outcome.value for header in ended if isinstance(header.outcome, Reward)]
    return mean_interval(rewards, session.campaign.domains[domain].reward_range)


async def _episode(session: Session, domain: str, seed: int) -> TrajectoryHeader:
    group = next(_numbers)
    for attempt in range(session.campaign.environment.attempts):
        ended: asyncio.Future[TrajectoryHeader] = asyncio.get_running_loop().create_future()
        member = MemberSpec(
            key=TrajectoryKey(group, 0, attempt),
            domain=domain,
            environment_seed=seed,
            sampling_seed=derived_seed(session.campaign.seed, "evaluation", domain, seed, attempt),
            initiating_version=session.served_version,
            temperature=session.campaign.rollout.evaluation_temperature,
            commit=False,
        )
        session.environments.submit([member], ended.set_result)
        header = await ended
        if isinstance(header.outcome, Reward):
            break
    return header
