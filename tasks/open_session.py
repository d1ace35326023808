"""Brings a run up from its folder and takes it down again: one way for real runs and simulated ones."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from blocks.sample_buffer import SampleBuffer
from infra.clock import now
from infra.launcher import Launcher, LocalLauncher
from infra.object_store import ObjectStore
from tasks.bindings import BindingsFile
from tasks.bring_up import (
    StartEnvironments,
    restored_ledger,
    service_parts,
    start_environment_cluster,
    start_parts,
    store_parts,
)
from tasks.campaign import Campaign
from tasks.report.run_files import RunFiles
from tasks.rollout.affinity import bind_domains, domain_manager, model_size
from tasks.rollout.affinity_driver import AffinityDriver
from tasks.run_folder import RunFolder
from tasks.session import Session, advice, surrounding, surrounding_session
from tasks.supervision import Supervisor
from tasks.train.collector import Collector
from tasks.train.lease import TrainerLease
from tasks.train.manifests import ManifestHistory, read_manifests

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_session(
    campaign: Campaign,
    folder: RunFolder,
    launcher: Launcher | None = None,
    start_environments: StartEnvironments = start_environment_cluster,
    lease_ttl_s: float = 30.0,
) -> AsyncIterator[Session]:
    """Bring a run up from its folder, at the newest checkpoint if it has one, and take it down at the end.

    Its services start where `launcher` puts them: on this machine by default. The model must be prepared.
    The trainer's lease is renewed three times in `lease_ttl_s`.
    Inside of another session for the same run, that one is used. Raises `PartLost` when a part of the run
    ends or freezes, whatever that makes of the calls under way.
    """
    outer = surrounding_session(folder)
    if outer is not None:
        yield outer
        return
    launcher = launcher or LocalLauncher(tuple(campaign.affinity.local_pools))
    started = now()
    supervisor = Supervisor(campaign.supervision, disk=folder.root)
    buffer = SampleBuffer(ObjectStore(folder.samples_url))
    async with (
        supervisor.attending(),
        TrainerLease.held(ObjectStore(folder.samples_url), ttl_s=lease_ttl_s) as lease,
        folder.uploaded(),
    ):
        parts: list[Callable[[], Awaitable[None]]] = []
        collector: Collector | None = None
        session: Session | None = None
        try:
            async with supervisor.explaining():
                for part in store_parts(campaign, folder):
                    supervisor.watch(part)
                bindings = BindingsFile(folder.root)
                resources = domain_manager(campaign, launcher.pools("rollout"), bindings)
                affinity = bind_domains(campaign, resources, bindings)
                trainer, fleet, environments = await start_parts(
                    campaign, folder, launcher, parts, affinity, start_environments
                )
                for part in service_parts(folder, trainer, fleet, environments):
                    supervisor.watch(part)
                version = int(trainer.ready["version"])
                supervisor.advice = advice(version)
                history = ManifestHistory(read_manifests(buffer).values())
                ledger = restored_ledger(campaign, buffer, history, version)
                files = RunFiles(folder.root)
                started -= files.drop_from_step(version)
                files.drop_ends_from_step(version if history.next_step is None else history.next_step)
                collector = Collector(
                    ledger, fleet, environments, buffer, lease, history, version, files, campaign.train
                )
                session = Session(
                    campaign,
                    folder,
                    files,
                    fleet,
                    environments,
                    trainer,
                    launcher,
                    collector,
                    buffer,
                    supervisor,
                    version,
                    started,
                )
                session.affinity = AffinityDriver(
                    campaign,
                    fleet,
                    resources,
                    bindings,
                    model_size(campaign, folder.model),
                    [manifest for manifest in history.manifests if manifest.step < version],
                )
                if version > 0:
                    await trainer.call("publish_weights", {"keep_from": version})
                    await fleet.suspend()
                    await fleet.load_weights(version)
                    await fleet.resume()
                with surrounding(session):
                    yield session
                    await session.pushed()
                    await session.observed()
        finally:
            supervisor.release()
            if session is not None:
                await session.abandon()
            if collector is not None:
                await collector.stop()
            for problem in await asyncio.gather(*(stop() for stop in parts), return_exceptions=True):
                if isinstance(problem, Exception):
                    logger.warning("a part of the run did not stop as it should: %s", problem)
