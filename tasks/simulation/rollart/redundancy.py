"""Redundant environments (§7.3): more groups, bigger groups, and the first to be complete make the batch."""

from tasks.simulation.rollart.claims import Given, Row, rests_on
from tasks.simulation.rollart.clusters import HARDWARE, cluster_of, engines
from tasks.simulation.rollart.workloads import campaign_of, givens_of
from tasks.simulation.run import simulate

GROUPS, GROUP_SIZE = 32, 8
GRID = {
    (8, 32): 1.00,
    (8, 34): 1.16,
    (8, 36): 1.30,
    (10, 32): 1.11,
    (10, 34): 1.38,
    (10, 36): 1.52,
    (12, 32): 1.24,
    (12, 34): 1.51,
    (12, 36): 1.62,
}
"""(group size, groups) -> speedup over (8, 32)."""

TAIL = (
    "the gain is how far the longest trajectories of a batch stand out, which the spread of lengths and "
    "what a group has of it in common decide; both are inferred here (sigma 0.5, a half). Means of 30 "
    "batches: of 10, the base alone varies by 7 %"
)


def rollout_seconds(group_size: int, groups: int, steps: int) -> float:
    """Mean time until a batch of 32 groups of 8 is there, of so many launched."""
    campaign = campaign_of(
        ["gem_math"],
        groups=GROUPS,
        group_size=GROUP_SIZE,
        steps=steps,
        mode="sync_plus",
        redundancy=(groups - GROUPS, group_size - GROUP_SIZE),
    )
    cluster = cluster_of(
        "8B", train=("h800", 32), rollout=[engines("h800", 32, 1)], domains=["gem_math"], colocated=True
    )
    return simulate(campaign, cluster, warm_up_steps=0).stage_seconds["get_batch"]


def rows(quick: bool = False) -> list[Row]:
    grid = {(8, 32): 1.00, (12, 36): 1.62} if quick else GRID
    steps = 1 if quick else 30
    seconds = {size: rollout_seconds(*size, steps) for size in grid}
    base = seconds[8, 32]
    basis = rests_on(
        HARDWARE,
        Given("8B, 32k, 32 H800, GEM-math, 32 groups of 8", "published", "§7.3"),
        Given("mode sync_plus, generation and training share the 32 H800", "inferred", "unstated"),
        givens_of(["gem_math"]),
    )
    return [
        Row(
            "redundancy: rollout time of 32 groups of 8 over that of more",
            f"{groups} groups of {group_size}",
            published,
            base / seconds[group_size, groups],
            basis,
            TAIL,
        )
        for (group_size, groups), published in grid.items()
        if (group_size, groups) != (8, 32)
    ]
