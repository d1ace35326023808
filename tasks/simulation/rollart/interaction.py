"""Trajectory-level against batch-level interaction (R2, §7.3), and what batching costs a real step (Fig. 3).

Both are modes of the one loop: `sync` plays all trajectories of a batch in lockstep, `sync_plus` each by
itself. Environments answer after N(10, sigma) seconds, cut at 0.
"""

from collections.abc import Sequence

from infra.performance.distributions import Distribution, Normal, constant
from tasks.simulation.rollart.claims import Given, Row, rests_on
from tasks.simulation.rollart.clusters import HARDWARE, cluster_of, engines
from tasks.simulation.rollart.workloads import PROFILES, campaign_of, givens_of
from tasks.simulation.run import simulate
from tasks.simulation.workload import DomainWorkload
from tasks.train.modes import ModeName

PUBLISHED = {1: 1.23, 3: 1.51, 5: 1.69, 7: 2.18, 10: 2.27}
MEAN_S = 10.0
FIG_3 = 1.213
BATCH = 128
GROUP_SIZE = 8
STEADY = constant(0)


def rollout_seconds(domain: str, workload: DomainWorkload, mode: ModeName, batch: int, steps: int) -> float:
    """Mean time from the batch's first reset to its last reward: 8B on 32 H800, which train in between."""
    cluster = cluster_of(
        "8B",
        train=("h800", 32),
        rollout=[engines("h800", 32, 1)],
        colocated=True,
        domains=[domain],
        workload={domain: workload.model_dump(exclude_none=True)},
    )
    campaign = campaign_of(
        [domain], groups=batch // GROUP_SIZE, group_size=GROUP_SIZE, steps=steps, mode=mode
    )
    return simulate(campaign, cluster, warm_up_steps=0).stage_seconds["get_batch"]


def gain(domain: str, workload: DomainWorkload, batch: int, steps: int) -> float:
    """Rollout time in lockstep over that of each trajectory by itself."""
    batched = rollout_seconds(domain, workload, "sync", batch, steps)
    return batched / rollout_seconds(domain, workload, "sync_plus", batch, steps)


def equal_lengths(workload: DomainWorkload) -> DomainWorkload:
    """The same with every response of the mean length."""
    return workload.model_copy(update={"response_tokens": constant(round(workload.response_tokens.mean))})


def normal_steps(sigma: float) -> DomainWorkload:
    """SWE's turns and lengths; only the environment's steps take time, N(10, sigma) each."""
    return PROFILES["swe"].workload.model_copy(
        update={
            "step_s": Distribution(normal=Normal(mean=MEAN_S, std=sigma)),
            "reset_s": STEADY,
            "reward_s": STEADY,
        }
    )


def spread_rows(sigmas: Sequence[int], batch: int, steps: int) -> list[Row]:
    basis = rests_on(
        HARDWARE,
        Given("8B, 32k, latency of each turn N(10, sigma) s", "published", "§7.3"),
        Given("Table 1's SWE: 30 to 50 turns, its lengths", "inferred", "the domain is not named"),
        Given(f"batch {batch} on 32 H800", "inferred", "§3.3's profile; unstated for R2"),
        Given(f"{steps} iterations instead of 10", "inferred", "to save time"),
        Given("resets and rewards take no time", "inferred", "only the latency of turns is varied"),
    )
    found = []
    for sigma in sigmas:
        workload = normal_steps(sigma)
        even = gain("swe", equal_lengths(workload), batch, steps)
        found.append(
            Row(
                "trajectory-level over batch-level interaction, rollout time",
                f"sigma {sigma} s",
                PUBLISHED[sigma],
                gain("swe", workload, batch, steps),
                basis,
                f"in lockstep a turn waits for the longest response too; with equal ones ours is {even:.2f}",
            )
        )
    return found


def profile_row(domains: Sequence[str], batch: int, steps: int) -> Row:
    """Fig. 3: what batching turns costs a rollout, at the most over the domains."""
    cost = {domain: gain(domain, PROFILES[domain].workload, batch, steps) for domain in domains}
    even = {
        domain: gain(domain, equal_lengths(PROFILES[domain].workload), batch, steps) for domain in domains
    }
    listed = ", ".join(f"{domain} {cost[domain]:.2f} ({even[domain]:.2f})" for domain in domains)
    return Row(
        "batched interaction over ideal, rollout time, at the most",
        f"8B, 32 H800, batch {batch}",
        FIG_3,
        max(cost.values()),
        rests_on(
            HARDWARE,
            givens_of(domains),
            Given("ideal: no trajectory waits for another", "inferred", "Fig. 3 is known at second hand"),
        ),
        f"ours: {listed}; in brackets with equal responses, so that a turn waits for environments only",
    )


def rows(quick: bool = False) -> list[Row]:
    if quick:
        return spread_rows([1, 10], 32, 1)
    return [
        *spread_rows(tuple(PUBLISHED), BATCH, 1),
        profile_row(("swe", "webshop", "frozen_lake"), BATCH, 1),
    ]
