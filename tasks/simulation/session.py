"""Opens the session of a simulated run: the real one, on simulated back ends and stores of this process."""

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from blocks.sample_buffer import SampleBuffer
from infra.held_files import SCHEME, HeldFiles
from infra.launcher import Launcher
from infra.models import config_of
from infra.object_store import ObjectStore
from tasks.campaign import Campaign
from tasks.open_session import open_session
from tasks.run_folder import RunFolder
from tasks.session import Session
from tasks.simulation.environments import SimulatedEnvironments
from tasks.simulation.fitting import RARE_S, Fitted
from tasks.simulation.hosts import SimulatedHosts
from tasks.simulation.launcher import SimulatedLauncher
from tasks.simulation.machine import machines_of
from tasks.simulation.renderer import SimulatedRenderer
from tasks.simulation.rewards import SimulatedRewards
from tasks.simulation.trainer import SimulatedTrainer
from tasks.simulation.usage import UsageMeter
from tasks.simulation.weights import SimulatedWeights
from tasks.simulation.workload import Workload

_numbers = itertools.count()


@asynccontextmanager
async def open_simulation(fitted: Fitted, root: Path) -> AsyncIterator[tuple[Session, UsageMeter]]:
    """A session that is up, with its files in `root`, and what measures how its pools are used."""
    name = f"simulation-{next(_numbers)}"
    url = f"{SCHEME}://{name}"
    folder = RunFolder(root, root / "model", f"{url}/samples", f"{url}/weights", f"{url}/checkpoints")
    campaign, cluster = _with_model(fitted, folder), fitted.cluster
    workload = Workload(cluster.workload, list(campaign.domains), campaign.seed)
    weights = SimulatedWeights(fitted.size, cluster.weights, len(fitted.engines))
    buffer = SampleBuffer(ObjectStore(folder.samples_url))
    machines = machines_of(fitted.host)
    trainer = SimulatedTrainer(fitted.training, cluster.train, campaign.train, buffer, weights, machines)
    launcher = SimulatedLauncher(fitted, workload, trainer, weights, machines)
    hosts = SimulatedHosts(workload, campaign.domains, machines)
    rewards = SimulatedRewards(
        workload,
        campaign.domains,
        kind=cluster.reward.kind,
        workers=cluster.reward.workers,
        cold_start_s=cluster.reward.cold_start_s,
        keep_alive_s=cluster.reward.keep_alive_s,
    )

    async def environments(campaign: Campaign, _: RunFolder, __: Launcher) -> SimulatedEnvironments:
        return SimulatedEnvironments(campaign, hosts, rewards, SimulatedRenderer(), buffer)

    try:
        async with open_session(campaign, folder, launcher, environments, lease_ttl_s=RARE_S) as session:
            yield session, UsageMeter(fitted, launcher, trainer, hosts, rewards)
    finally:
        HeldFiles.forget(name)


def _with_model(fitted: Fitted, folder: RunFolder) -> Campaign:
    """The campaign of the cluster's model, whose configuration is in the run's folder as a run's is."""
    folder.model.mkdir(parents=True, exist_ok=True)
    folder.logs.mkdir(exist_ok=True)
    (folder.model / "config.json").write_text(json.dumps(config_of(fitted.cluster.model)))
    model = fitted.campaign.model.model_copy(update={"path": str(folder.model)})
    campaign = fitted.campaign.model_copy(update={"model": model})
    folder.campaign_file.write_text(campaign.dump())
    return campaign
