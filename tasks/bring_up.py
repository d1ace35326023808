"""What a run needs before its first step: its services started side by side, and its ledger restored."""

import asyncio
import secrets
import urllib.parse
from collections.abc import Awaitable, Callable

from blocks.mooncake import MooncakeObjects
from blocks.sample_buffer import SampleBuffer
from infra.launcher import Launcher, Service
from infra.object_store import ObjectStore
from tasks.campaign import Campaign
from tasks.environment.cluster import EnvironmentCluster, Environments
from tasks.rollout.affinity import BoundAffinity
from tasks.rollout.fleet import RolloutFleet
from tasks.run_folder import RunFolder
from tasks.supervision import Part, object_store_part, service_part, store_part
from tasks.train.ledger import Ledger
from tasks.train.manifests import ManifestHistory
from tasks.train.modes import MODES
from tasks.trajectory_arrow import from_arrow_many

StartEnvironments = Callable[[Campaign, RunFolder, Launcher], Awaitable[Environments]]
"""Starts the environment side of a run, to be told by `connect` which services it will use."""


async def start_environment_cluster(
    campaign: Campaign, folder: RunFolder, launcher: Launcher
) -> EnvironmentCluster:
    """The Dask cluster that the campaign names, or one of the run's own."""
    members = campaign.train.group_size + campaign.train.redundancy.members
    if MODES[campaign.train.mode].lockstep:
        members = 1  # a retry must not wait for a task whose members wait for it
    return await EnvironmentCluster.start(
        campaign.environment, members, launcher, folder.logs, campaign.supervision.silence_limit_s
    )


async def start_parts(
    campaign: Campaign,
    folder: RunFolder,
    launcher: Launcher,
    parts: list[Callable[[], Awaitable[None]]],
    affinity: BoundAffinity,
    start_environments: StartEnvironments = start_environment_cluster,
) -> tuple[Service, RolloutFleet, Environments]:
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
            affinity=affinity.pools,
            fall_backs=affinity.fall_backs,
            lockstep=MODES[campaign.train.mode].lockstep,
        )
        parts.append(fleet.stop)
        return fleet

    async def environments() -> Environments:
        cluster = await start_environments(campaign, folder, launcher)
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


def store_parts(campaign: Campaign, folder: RunFolder) -> list[Part]:
    """The servers that hold the run's stores, each once; a local folder is no part of its own."""
    urls = {"sample buffer": folder.samples_url, "checkpoint store": folder.checkpoints_url}
    parts: dict[str, Part] = {}
    for name, url in urls.items():
        store = ObjectStore(url)
        if not store.is_local:
            parts.setdefault(url.rpartition("/")[0], object_store_part(name, store))
    weights = folder.weights_url
    if weights.startswith("mooncake://"):
        master = urllib.parse.urlsplit(weights).netloc
        parts[master] = store_part(
            "the Mooncake master", master, lambda: MooncakeObjects.open(weights).alive()
        )
    elif not ObjectStore(weights).is_local:
        parts.setdefault(weights.rpartition("/")[0], object_store_part("weight store", ObjectStore(weights)))
    return list(parts.values())


def service_parts(
    folder: RunFolder, trainer: Service, fleet: RolloutFleet, environments: Environments
) -> list[Part]:
    return [
        service_part("the trainer", trainer, folder.logs / "trainer.log"),
        # It starts engines and proxy again by itself, and ends when it no longer can.
        Part("the rollout side", ended=fleet.wait_failed, log=folder.logs / "proxy.log"),
        Part(
            environments.name,
            ended=environments.wait_failed,
            sign=environments.alive,
        ),
    ]


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
