"""How the pools of a simulation are used: device-seconds at work, read once a step."""

from collections import defaultdict
from dataclasses import dataclass

from infra.clock import now
from tasks.simulation.fitting import Fitted
from tasks.simulation.hosts import SimulatedHosts
from tasks.simulation.launcher import SimulatedLauncher
from tasks.simulation.rewards import SimulatedRewards
from tasks.simulation.trainer import SimulatedTrainer


@dataclass(frozen=True, slots=True)
class Usage:
    """Since the simulation began."""

    at: float  # seconds
    busy: dict[str, float]  # device-seconds at work, by pool
    function_seconds: float  # that a function service bills


class UsageMeter:
    """Engines work while they have a batch, the trainer while it has a step, dedicated reward workers while
    they judge. A CPU pool's environments count by their places, where these are bounded: a place is one
    device's worth of them, of `devices` / `places` devices."""

    def __init__(
        self,
        fitted: Fitted,
        launcher: SimulatedLauncher,
        trainer: SimulatedTrainer,
        hosts: SimulatedHosts,
        rewards: SimulatedRewards,
    ):
        self._fitted = fitted
        self._launcher = launcher
        self._trainer = trainer
        self._hosts = hosts
        self._rewards = rewards

    async def read(self) -> Usage:
        cluster = self._fitted.cluster
        busy: defaultdict[str, float] = defaultdict(float)
        for name, engine in self._launcher.engines.items():
            spec = self._fitted.engines[int(name.rpartition("-")[2])].spec
            busy[spec.pool] += (await engine.stats()).busy_seconds * spec.parallel.devices
        busy[cluster.train.pool] += self._trainer.busy_seconds * cluster.train.devices
        places = cluster.environment.places
        if places is not None:
            pool = cluster.environment.pool
            busy[pool] += self._hosts.busy_seconds * cluster.pools[pool].devices / places
        usage = self._rewards.usage()
        if cluster.reward.kind == "dedicated" and cluster.reward.pool is not None:
            busy[cluster.reward.pool] += usage.busy_seconds
        return Usage(now(), dict(busy), usage.function_seconds)
