"""Which pool suits each domain, from what its trajectories are made of. Pure.

The performance model (`tasks.rollout.roofline`) says how long an engine of each pool takes for a trajectory
of each domain; the mapping is the one with which the slowest pool is done first.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from infra.model_size import ModelSize
from infra.resources import ANYWHERE
from tasks.rollout.roofline import (
    DomainWork,
    RolloutPool,
    TrajectoryTime,
    trajectory_time,
)

MOST_MAPPINGS = 20_000
"""Beyond so many mappings not all are tried: each domain then goes where it is best, one after the other."""
TIE = 0.01
"""Mappings whose times differ by less than this share are equally quick; the cheaper one is taken."""
SHARING = 0.1
"""A domain is left on all pools only where that is quicker by this share: how they share it is idealised
here, while the router balances open trajectories."""


@dataclass(frozen=True, slots=True)
class Advice:
    mapping: dict[str, str]  # a pool for each domain, or `ANYWHERE`
    makespan_s: float
    """Seconds of generation for a step's trajectories: the pools work side by side."""
    current_s: float
    """The same under the present mapping."""
    reasons: dict[str, str]  # by domain
    rows: list[dict[str, Any]]  # a domain and pool each: what the reasons are made of

    @property
    def gain(self) -> float:
        """The share of the present mapping's time that this one saves."""
        return 1 - self.makespan_s / self.current_s if self.current_s else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "gain": self.gain}


def recommend(
    works: Sequence[DomainWork],
    size: ModelSize,
    pools: Sequence[RolloutPool],
    current: Mapping[str, str],
    running: int,
) -> Advice | None:
    """The mapping with which a step's trajectories are generated soonest, all pools side by side.

    The run holds all its pools for as long as the slowest works, so the price of a step is its makespan times
    the cost of all; among equally quick mappings, that with the least cost-weighted busy time is taken.
    `current` gives each domain's pool; one that is missing goes anywhere, and may go on to. None where some
    domain's model fits no pool, or where nothing was generated.
    """
    if not works or not pools:
        return None
    by_name = {pool.name: pool for pool in pools}
    times = {
        work.domain: {pool.name: trajectory_time(work, size, pool, running) for pool in pools}
        for work in works
    }
    fitting: dict[str, dict[str, float]] = {
        domain: {name: time.total_s for name, time in on_pools.items() if time is not None}
        for domain, on_pools in times.items()
    }
    if not all(fitting.values()):
        return None
    now = {work.domain: current.get(work.domain, ANYWHERE) for work in works}
    now = {domain: pool if pool in fitting[domain] else ANYWHERE for domain, pool in now.items()}
    choices = [
        [*fitting[work.domain], *([ANYWHERE] if now[work.domain] == ANYWHERE else [])] for work in works
    ]
    rated = [
        (*_price(works, mapping, fitting, by_name), mapping)
        for mapping in _mappings(works, choices, fitting, by_name)
    ]
    quickest = min(_with_sharing(makespan, mapping) for makespan, _, mapping in rated)
    makespan, _, mapping = min(
        (entry for entry in rated if _with_sharing(entry[0], entry[2]) <= quickest * (1 + TIE)),
        key=lambda entry: (entry[1], entry[0]),
    )
    current_s, _ = _price(works, now, fitting, by_name)
    return Advice(
        mapping,
        makespan,
        current_s,
        {work.domain: _reason(work, mapping[work.domain], times[work.domain], by_name) for work in works},
        [_row(work, pool, times[work.domain][pool.name]) for work in works for pool in pools],
    )


def _with_sharing(makespan: float, mapping: Mapping[str, str]) -> float:
    return makespan * (1 + SHARING) if ANYWHERE in mapping.values() else makespan


def _mappings(
    works: Sequence[DomainWork],
    choices: Sequence[Sequence[str]],
    fitting: Mapping[str, Mapping[str, float]],
    pools: Mapping[str, RolloutPool],
) -> Iterator[dict[str, str]]:
    """All mappings; with too many, one: the largest domain first, each where the step then ends soonest."""
    count = 1
    for choice in choices:
        count *= len(choice)
    domains = [work.domain for work in works]
    if count <= MOST_MAPPINGS:
        for picked in itertools.product(*choices):
            yield dict(zip(domains, picked, strict=True))
        return
    mapping: dict[str, str] = {}
    placed: list[DomainWork] = []
    by_size = sorted(
        zip(works, choices, strict=True),
        key=lambda pair: -pair[0].trajectories * min(fitting[pair[0].domain].values()),
    )
    for work, choice in by_size:
        placed.append(work)
        mapping[work.domain] = min(
            choice, key=lambda name: _price(placed, {**mapping, work.domain: name}, fitting, pools)
        )
    yield mapping


def _price(
    works: Iterable[DomainWork],
    mapping: Mapping[str, str],
    fitting: Mapping[str, Mapping[str, float]],
    pools: Mapping[str, RolloutPool],
) -> tuple[float, float]:
    """Makespan in seconds, and cost-weighted device-seconds."""
    busy = dict.fromkeys(pools, 0.0)  # engine-seconds
    spread = []
    for work in works:
        pool = mapping[work.domain]
        if pool == ANYWHERE:
            spread.append(work)
        else:
            busy[pool] += work.trajectories * fitting[work.domain][pool]
    for work in spread:
        _spread(work, fitting[work.domain], pools, busy)
    makespan = max(seconds / pools[name].engines for name, seconds in busy.items())
    cost = sum(seconds * pools[name].devices * pools[name].hardware.cost for name, seconds in busy.items())
    return makespan, cost


def _spread(
    work: DomainWork,
    seconds: Mapping[str, float],
    pools: Mapping[str, RolloutPool],
    busy: dict[str, float],
) -> None:
    """Share a domain's trajectories out so that the pools that get some are done at the same time."""
    free_from = sorted((busy[name] / pools[name].engines, name) for name in seconds)
    rate = done = 0.0  # trajectories a second of the pools taken in; what they would have done by time 0
    end = 0.0
    for index, (free, name) in enumerate(free_from):
        rate += pools[name].engines / seconds[name]
        done += free * pools[name].engines / seconds[name]
        end = (work.trajectories + done) / rate
        if index + 1 == len(free_from) or end <= free_from[index + 1][0]:
            break
    for free, name in free_from:
        if end > free:
            busy[name] += (end - free) * pools[name].engines


def _row(work: DomainWork, pool: RolloutPool, time: TrajectoryTime | None) -> dict[str, Any]:
    return {
        "domain": work.domain,
        "pool": pool.name,
        "hardware": pool.hardware.name,
        "engines": pool.engines,
        "trajectories": work.trajectories,
        "turns": work.turns,
        "prefilled": work.prefilled,
        "decoded": work.decoded,
        "prefill_share": work.prefill_share,
        "prefill_s": None if time is None else time.prefill_s,
        "decode_s": None if time is None else time.decode_s,
    }


def _reason(
    work: DomainWork,
    chosen: str,
    times: Mapping[str, TrajectoryTime | None],
    pools: Mapping[str, RolloutPool],
) -> str:
    """One sentence with the numbers that decide."""
    prefill = work.prefill_share
    shares = f"{prefill:.0%} prefill" if prefill >= 0.5 else f"{1 - prefill:.0%} decode"
    head = f"{work.domain}: {work.turns:.1f} turns, {shares}"
    if chosen == ANYWHERE:
        head += "; anywhere, for all pools together are done soonest"
        chosen = min(
            (name for name, time in times.items() if time is not None),
            key=lambda name: (_seconds(times[name]) / pools[name].engines, name),
        )
    own = times[chosen]
    assert own is not None
    others = []
    for name, time in times.items():
        if name == chosen:
            continue
        if time is None:
            others.append(f"{name} has no room for the model")
            continue
        cost = {pool: pools[pool].hardware.cost * pools[pool].devices for pool in (chosen, name)}
        quicker = time.total_s / own.total_s
        cheaper = quicker * cost[name] / cost[chosen]
        others.append(
            f"an engine of {chosen} takes {1 / quicker:.2f} of the time that one of {name} takes for a "
            f"trajectory, {1 / cheaper:.2f} of its cost"
        )
    return "; ".join([head, *others])


def _seconds(time: TrajectoryTime | None) -> float:
    return inf if time is None else time.total_s
