"""Hardware affinity (R1, §7.3): what mixed pools gain over one kind of GPU at equal cost.

End to end: 32 H800 train; 72 H800, or 208 H20, or 64 H800 with 24 H20 generate, which cost the same. And one
domain on one pool: 2 H800 against 6 H20, where FrozenLake is faster on the former and GEM-math on the latter.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.simulation.result import SimulationResult
from tasks.simulation.rollart.claims import Given, Row, extremes, rests_on
from tasks.simulation.rollart.clusters import HARDWARE, MOONCAKE, RDMA, ROLLOUT_TP, cluster_of, engines
from tasks.simulation.rollart.workloads import MAIN, PROFILES, affinity_of, campaign_of, givens_of
from tasks.simulation.run import simulate
from tasks.train.modes import ModeName

EQUAL_COST = {"H20 only": {"h20": 208}, "H800 only": {"h800": 72}, "mixed": {"h800": 64, "h20": 24}}
"""Rollout devices by pool: 208, 205.2 and 206.4 in hours of an H20."""
PUBLISHED = {"H20 only": (1.30, 1.68), "H800 only": (1.12, 1.37)}
BATCHES = (64, 128, 192)
GROUP_SIZE = 8
TRAJECTORIES, PROMPTS = 64, 512
"""Groups of a batch of 512, by what is counted."""
SHARES = {"8B": 4, "14B": 4, "32B": 2}
"""Simulated is this part of every pool with this part of the batch: each engine's load stays as it is."""
SMALLEST_SHARES = {"8B": 8, "14B": 4, "32B": 2}
"""So that 9, 26, and 8 and 3 engines are left."""


_MORE_BANDWIDTH = (
    "208 H20 have 2.7 times the bandwidth of the mixed pools and 0.46 of their compute: with a prefix cache "
    "our domains prefill too little for that to outweigh decoding"
)


def _run(
    model: str, rollout: Mapping[str, int], mode: ModeName, groups: int, share: int, steps: int
) -> SimulationResult:
    domains = MAIN[model]
    # The trainer's H800 are a pool of their own, so that all of a rollout pool is rollout.
    cluster = cluster_of(
        model,
        train=("train", 32 // share),
        rollout=[engines(pool, count // share, ROLLOUT_TP[model]) for pool, count in rollout.items()],
        hardware={"train": "h800"},
        domains=domains,
        weights=RDMA if list(rollout) == ["h800"] else MOONCAKE,
        affinity=affinity_of(domains) if len(rollout) > 1 else {},
    )
    campaign = campaign_of(domains, groups=groups // share, group_size=GROUP_SIZE, steps=steps, mode=mode)
    return simulate(campaign, cluster, warm_up_steps=min(2, steps - 1))


def _gains(seconds: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Of the mixed pools over each other cluster, by model."""
    return {
        name: {model: by_cluster[name] / by_cluster["mixed"] for model, by_cluster in seconds.items()}
        for name in PUBLISHED
    }


def _basis(models: Sequence[str], *more: Given) -> dict[str, list[str]]:
    return rests_on(
        HARDWARE,
        Given("72 H800, 208 H20, 64 H800 and 24 H20; 32 H800 train; alpha 1", "published", "§7.3"),
        Given("math and game to H20, the others to H800", "published", "§7.3, but for FrozenLake: §5.1"),
        Given(
            "a part of every pool with that part of the batch", "inferred", "each engine's load is the same"
        ),
        *more,
        *givens_of({domain for model in models for domain in MAIN[model]}),
    )


def step_times(models: Sequence[str], steps: int, shares: Mapping[str, int]) -> list[Row]:
    """The claim itself: step time of the whole system."""
    found = {
        model: {
            name: _run(model, rollout, "tutti", TRAJECTORIES, shares[model], steps)
            for name, rollout in EQUAL_COST.items()
        }
        for model in models
    }
    gains = _gains(
        {model: {name: run.step_seconds for name, run in runs.items()} for model, runs in found.items()}
    )
    basis = _basis(models, Given("batch 512 are trajectories", "inferred", "unstated"))
    stalls = {
        name: ", ".join(
            f"{model} {_not_rollout(found[model][name]):.0%} and {_not_rollout(found[model]['mixed']):.0%}"
            for model in models
        )
        for name in PUBLISHED
    }
    return [
        row
        for name, gain in gains.items()
        for row in extremes(
            f"affinity over {name} at equal cost, step time",
            "8B to 32B",
            PUBLISHED[name],
            gain,
            basis,
            f"training and publication of weights alone take this share of a step ({name}, and mixed): "
            f"{stalls[name]}; what rollout gains shows only in the rest",
        )
    ]


def _not_rollout(result: SimulationResult) -> float:
    """Share of the step that would be left if batches were there at once."""
    stages = ("train_step", "publish", "pull", "suspend", "update", "resume")
    return min(sum(result.stage_seconds.get(stage, 0.0) for stage in stages) / result.step_seconds, 1.0)


def rollout_times(models: Sequence[str], shares: Mapping[str, int]) -> list[Row]:
    """What the claim is about: the time in which the batch is rolled out, with nothing else in its way."""
    seconds = {
        model: {
            name: _run(model, rollout, "sync_plus", PROMPTS, shares[model], 1).stage_seconds["get_batch"]
            for name, rollout in EQUAL_COST.items()
        }
        for model in models
    }
    basis = _basis(
        models,
        Given("batch 512 are prompts, of 8 trajectories each", "inferred", "unstated"),
        Given(
            "rollout of one batch, without training", "inferred", "where training is not what bounds a step"
        ),
    )
    return [
        row
        for name, gain in _gains(seconds).items()
        for row in extremes(
            f"affinity over {name} at equal cost, rollout alone",
            ", ".join(models),
            PUBLISHED[name],
            gain,
            basis,
            _MORE_BANDWIDTH if name == "H20 only" else "",
        )
    ]


def _rollout_seconds(domain: str, pool: str, devices: int, batch: int, steps: int) -> float:
    """Mean time from the batch's first request to its last reward."""
    cluster = cluster_of(
        "8B",
        train=("train", 8),
        rollout=[engines(pool, devices, 1)],
        hardware={"train": "h800"},
        domains=[domain],
    )
    campaign = campaign_of(
        [domain], groups=batch // GROUP_SIZE, group_size=GROUP_SIZE, steps=steps, mode="sync_plus"
    )
    return simulate(campaign, cluster, warm_up_steps=0).stage_seconds["get_batch"]


def one_domain(domain: str, batches: Sequence[int], steps: int) -> dict[str, float]:
    """Rollout time on 2 H800 over that on 6 H20, by batch."""
    return {
        f"batch {batch}": _rollout_seconds(domain, "h800", 2, batch, steps)
        / _rollout_seconds(domain, "h20", 6, batch, steps)
        for batch in batches
    }


def pools_compared(batches: Sequence[int], steps: int) -> list[Row]:
    basis: dict[str, Any] = {
        domain: rests_on(
            HARDWARE,
            Given("2 H800 or 6 H20, 8B, 32k, prefix cache, batch 64 to 192", "published", "§7.3"),
            Given("engines of one device", "published", "§7.1: rollout TP 1 for 8B"),
            Given(f"{steps} iterations instead of 10", "inferred", "to save time"),
            PROFILES[domain].givens,
        )
        for domain in ("frozen_lake", "gem_math")
    }
    lake = one_domain("frozen_lake", batches, steps)
    math = {batch: 1 / ratio for batch, ratio in one_domain("gem_math", batches, steps).items()}
    listed = ", ".join(f"{batch} {ratio:.2f}" for batch, ratio in lake.items())
    return [
        Row(
            "FrozenLake: rollout on 2 H800 over 6 H20, lowest",
            "8B, 32k",
            0.53,
            min(lake.values()),
            basis["frozen_lake"],
            f"ours: {listed}. A turn adds some 320 tokens to a cached context, so that FrozenLake mostly "
            "decodes here too; and from batch 128 on the contexts of the batch exceed the KV of 2 H800 (some "
            "350,000 tokens each), which then compute evicted prefixes again, where 6 H20 hold them",
        ),
        *extremes(
            "GEM-math: rollout on 6 H20 over 2 H800",
            "8B, 32k, batch 64 to 192",
            (0.49, 0.79),
            math,
            basis["gem_math"],
            "the longest trajectories decode alone at the end, at nearly the same speed on both: measured "
            "kernels reach 0.70 of an H20's bandwidth and 0.86 of an H800's",
        ),
    ]


def rows(quick: bool = False) -> list[Row]:
    if quick:
        return [*step_times(["8B"], 2, SMALLEST_SHARES), *pools_compared([64], 1)]
    return [
        *step_times(tuple(MAIN), 4, SHARES),
        *rollout_times(("8B",), SMALLEST_SHARES),
        *pools_compared(BATCHES, 1),
    ]
