"""What a run needs before its first step: its services started side by side, and its ledger restored."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from blocks.sample_buffer import SampleBuffer
from infra.launcher import Launcher, Service
from tasks.campaign import Campaign
from tasks.environment.cluster import EnvironmentCluster
from tasks.rollout.fleet import RolloutFleet
from tasks.run_folder import RunFolder
from tasks.train.ledger import Ledger
from tasks.train.manifests import ManifestHistory
from tasks.trajectory_arrow import from_arrow_many


async def start_parts(
    campaign: Campaign,
    folder: RunFolder,
    launcher: Launcher,
    parts: list[Callable[[], Awaitable[None]]],
) -> tuple[Service, RolloutFleet, EnvironmentCluster]:
    """Start trainer, engines and environments side by side; `parts` gets what stops each that started."""
    token = secrets.token_urlsafe(24)

    async def trainer() -> Service:
        service = await launcher.start(
            launcher.pools("train")[0],
            "trainer",
            "tasks.train.service",
            {
                "campaign": campaign.model_dump(mode="json"),
                "model": str(folder.model),
                "samples": folder.samples_url,
                "weights": folder.weights_url,
                "checkpoints": folder.checkpoints_url,
                "token": token,
            },
            folder.logs / "trainer.log",
            environment={"OMP_NUM_THREADS": str(campaign.train.trainer.threads)},
            start_limit_s=campaign.train.trainer.start_limit_s,
        )
        parts.append(service.stop)
        return service

    async def fleet() -> RolloutFleet:
        fleet = await RolloutFleet.start(
            campaign.rollout,
            launcher,
            model=folder.model,
            max_context=max(domain.max_tokens for domain in campaign.domains.values()),
            weights_url=folder.weights_url,
            version=None,
            logs=folder.logs,
        )
        parts.append(fleet.stop)
        return fleet

    async def environments() -> EnvironmentCluster:
        members = campaign.train.group_size + campaign.train.redundancy.members
        cluster = await EnvironmentCluster.start(campaign.environment, members, launcher, folder.logs)
        parts.append(cluster.stop)
        return cluster

    started = await asyncio.gather(trainer(), fleet(), environments(), return_exceptions=True)
    for result in started:
        if isinstance(result, BaseException):
            raise result
    service, rollout, cluster = started
    assert not isinstance(service, BaseException)
    assert not isinstance(rollout, BaseException)
    assert not isinstance(cluster, BaseException)
    cluster.connect(
        {
            "proxy": {"url": rollout.proxy_url, "token": rollout.token},
            "campaign": campaign.model_dump(mode="json"),
            "model": str(folder.model),
            "samples": {"url": folder.samples_url},
            "topic": f"trajectories-{folder.name}",
        }
    )
    return service, rollout, cluster


def restored_ledger(
    campaign: Campaign, buffer: SampleBuffer, history: ManifestHistory, version: int
) -> Ledger:
    ledger = Ledger(
        weights={name: domain.weight for name, domain in campaign.domains.items()},
        train=campaign.train,
        seed=campaign.seed,
        temperature=campaign.rollout.temperature,
        attempts=campaign.environment.attempts,
        failure_budget=campaign.environment.failure_budget,
    )
    waiting = history.unconsumed(buffer.names())
    trajectories = from_arrow_many(buffer.get_many(waiting))
    next_step = history.next_step
    ledger.restore(
        version=version,
        next_step=version if next_step is None else next_step,
        trained={(entry.group, entry.domain) for batch in history.manifests for entry in batch.trajectories},
        retired=history.retired_groups,
        committed=[trajectory.header(name=str(trajectory.key)) for trajectory in trajectories],
    )
    return ledger
