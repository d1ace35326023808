"""The affinity profile of a run: after each step it reads what the step's trajectories were made of, says
which pool suits each domain, and re-binds new trajectories where the campaign has it applied.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any, Protocol

from infra.model_size import ModelSize
from infra.resources import ANYWHERE, ResourceManager
from tasks.bindings import BindingsFile
from tasks.campaign import Campaign
from tasks.rollout.affinity import DOMAINS, bound_affinity
from tasks.rollout.affinity_profile import Advice, recommend
from tasks.rollout.affinity_window import Hysteresis, TrajectoryWindow
from tasks.rollout.roofline import RolloutPool
from tasks.train.manifests import BatchManifest

logger = logging.getLogger(__name__)


class Fleet(Protocol):
    """What the profile asks of the rollout side (`tasks.rollout.fleet.RolloutFleet`)."""

    async def counters(self) -> Counter[str]: ...

    async def serving_pools(self) -> list[str]: ...

    async def rebind(self, affinity: Mapping[str, str]) -> None: ...


class AffinityDriver:
    """`manager` holds the domains' bindings, `past` the batches that the run has trained before."""

    def __init__(
        self,
        campaign: Campaign,
        fleet: Fleet,
        manager: ResourceManager,
        file: BindingsFile,
        size: ModelSize | None,
        past: Sequence[BatchManifest] = (),
    ):
        self._settings = campaign.affinity
        self._campaign = campaign
        self._domains = list(campaign.domains)
        self._fleet = fleet
        self._manager = manager
        self._file = file
        self._size = size
        self._window = TrajectoryWindow(self._settings.window)
        self._hysteresis = Hysteresis(self._settings.gain, self._settings.patience)
        self._counters: Counter[str] = Counter()
        self._said: dict[str, str] = {}
        self.advice: Advice | None = None
        """The newest one."""
        for manifest in past[-self._settings.window :]:
            self._window.add(manifest.trajectories)

    @property
    def mapping(self) -> dict[str, str]:
        """The pool of each of the campaign's domains now; a domain that goes anywhere is missing."""
        bound = {domain: self._manager.bindings.get(f"{DOMAINS}{domain}") for domain in self._domains}
        return {
            domain: binding.pool
            for domain, binding in bound.items()
            if binding is not None and binding.pool != ANYWHERE
        }

    async def step(self, batch: BatchManifest) -> Advice | None:
        """A step's batch was trained. Returns the advice, None where the profile is off or has none."""
        if self._settings.profile == "off" or self._size is None:
            return None
        await self._observe(batch)
        current = self.mapping
        pools = rollout_pools(self._campaign, self._manager, await self._fleet.serving_pools())
        running = most_running(self._campaign, sum(pool.engines for pool in pools))
        advice = recommend(self._window.works(), self._size, pools, current, running)
        if advice is None:
            return None
        self.advice = advice
        if self._settings.profile == "apply" and self._hysteresis.accepts(advice, current):
            await self._apply(batch.step, advice, current)
        elif advice.mapping != self._said and advice.gain >= self._settings.gain:
            logger.warning("affinity profile, step %d, recommends %s", batch.step, describe(advice))
        self._said = advice.mapping
        self._file.save_advice(self._to_json(batch.step, advice, current))
        return advice

    async def _observe(self, batch: BatchManifest) -> None:
        self._window.add(batch.trajectories)
        counters = await self._fleet.counters()
        done = {name: counters[name] - self._counters[name] for name in counters}
        self._counters = counters
        self._window.add_engine_work(
            done.get("prefill_tokens", 0) - done.get("recomputed_tokens", 0), done.get("decode_tokens", 0)
        )

    async def _apply(self, step: int, advice: Advice, current: Mapping[str, str]) -> None:
        moved = {
            domain: pool
            for domain, pool in advice.mapping.items()
            if pool not in (ANYWHERE, current.get(domain))
        }
        for domain, pool in moved.items():
            self._manager.move(f"{DOMAINS}{domain}", pool, advice.reasons[domain])
        # Before the proxy hears of it: a run that is killed in between binds so when it is resumed.
        self._file.save(DOMAINS, list(self._manager.bindings.values()))
        self._file.append_change(step, self.mapping, [advice.reasons[domain] for domain in moved])
        await self._fleet.rebind(bound_affinity(self._manager).pools)
        logger.warning("affinity profile re-binds new trajectories after step %d: %s", step, describe(advice))

    def _to_json(self, step: int, advice: Advice, current: Mapping[str, str]) -> dict[str, Any]:
        return {"step": step, "before": dict(current), "bound": self.mapping, **advice.to_json()}


def rollout_pools(campaign: Campaign, manager: ResourceManager, engines: Iterable[str]) -> list[RolloutPool]:
    """Pools with engines, of which the hardware is known."""
    devices = getattr(campaign.rollout.engine, "tensor_parallel", 1)
    pools = []
    for name, count in sorted(Counter(engines).items()):
        pool = manager.pools.get(name)
        if pool is not None and pool.hardware is not None:
            pools.append(RolloutPool(name, pool.hardware, count, devices))
    return pools


def most_running(campaign: Campaign, engines: int) -> int:
    """Trajectories that one engine runs beside each other: its share of what may be in flight at all."""
    train = campaign.train
    in_flight = train.groups * train.group_size * (train.alpha + 1)
    return max(1, min(campaign.rollout.engine.max_running, ceil(in_flight / max(engines, 1))))


def describe(advice: Advice) -> str:
    """The advice in a line."""
    mapping = ", ".join(
        f"{domain} on {'any pool' if pool == ANYWHERE else pool}" for domain, pool in advice.mapping.items()
    )
    return f"{mapping} ({advice.gain:.0%} less generation time). " + ". ".join(advice.reasons.values())
