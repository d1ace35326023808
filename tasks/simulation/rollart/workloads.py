"""RollArt's domains (Table 1) as workloads, and campaigns over them. Every number says where it is from.

The paper gives turns, context and profile of each domain, and one breakdown of a step (§3.3: SWE, 8B, 32
H800, batch 128). Lengths of single turns and latencies of environments are not published: those of SWE are
fitted to that breakdown, the others inferred by two rules that `OBSERVATION_RULE` and `SPREAD` state.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infra.performance.distributions import Distribution, LogNormal, Tail, Uniform, constant
from tasks.campaign import Campaign
from tasks.simulation.rollart.claims import Given
from tasks.simulation.workload import DomainWorkload
from tasks.train.modes import ModeName

CONTEXT = 32_768
"""Tokens, prompt and observations included: "max context 32k" (§7.1)."""

OBSERVATION_RULE = (
    "inferred: an episode of the most turns in Table 1, at mean lengths, just fills the 32k context"
)
SPREAD = 0.5
"""Sigma of the logarithm of lengths and latencies. In production (§3.3) the longest of a step's thousands of
responses is 5 to 9 times the mean: a log-normal of 3.5 standard deviations is there for sigma 0.5 to 0.7."""

FAILED_RESET_S = 201.0
"""§3.3: an iteration with environment failures lasts 513.3 s instead of 365.7. The difference is reset, which
is 53.4 s in the latter."""
RESET_FAILURE = 1 - 0.9 ** (1 / 128)
"""Of one reset: then 1 of 10 iterations of 128 trajectories has one (§3.1)."""


def uniform(low: float, high: float) -> Distribution:
    return Distribution(uniform=Uniform(low=low, high=high))


def lognormal(median: float, sigma: float, **more: Any) -> Distribution:
    return Distribution(lognormal=LogNormal(median=median, sigma=sigma), **more)


@dataclass(frozen=True, slots=True)
class Profile:
    """One domain of Table 1."""

    workload: DomainWorkload
    pool: Literal["h800", "h20"]
    """The rollout pool that it is bound to where affinity is on."""
    givens: tuple[Given, ...]


FAILURES = (
    Given(
        f"a reset fails with probability {RESET_FAILURE:.1e}",
        "inferred",
        "§3.1: 1 iteration of batch 128 in 10",
    ),
    Given(
        f"a failed reset takes {FAILED_RESET_S:.0f} s (log-normal, sigma 0.25)",
        "inferred",
        "§3.3: 513.3 s - 365.7 s + 14.6 % of 365.7 s",
    ),
)
_SPREAD = Given(
    f"lengths and latencies are log-normal, sigma {SPREAD}", "inferred", "§3.3: longest > 5x mean, peak 9x"
)
_SHARE = Given(
    "half of the variance of turns and lengths is common to a group", "inferred", "group_share, our estimate"
)
_LIGHT_RESET = Given(
    "reset: log-normal, median 1 s, sigma 0.7",
    "inferred",
    "a process of the CPU cluster: no image to pull, so no failures of that either; spread as SWE's",
)

PROFILES: dict[str, Profile] = {
    "swe": Profile(
        DomainWorkload(
            prompt_tokens=constant(3000),
            turns=uniform(30, 50),
            response_tokens=lognormal(335, SPREAD),
            observation_tokens=lognormal(190, SPREAD),
            reset_s=lognormal(
                15.0, 0.7, tail=Tail(probability=RESET_FAILURE, of=lognormal(FAILED_RESET_S, 0.25))
            ),
            step_s=lognormal(0.58, SPREAD),
            reward_s=lognormal(2.0, SPREAD),
        ),
        "h800",
        (
            Given("SWE: 30 to 50 turns", "published", "Table 1; uniform between is inferred"),
            Given("SWE: prompts of 3,000 tokens", "inferred", "issue text and tool descriptions"),
            Given(
                "SWE: responses of 380 tokens",
                "fitted",
                "§3.3: generation, 53.8 % of 365.7 s, each trajectory by itself. In lockstep, 170 tokens "
                "fit too; but then 32B rollouts take 218 s, where those of the prefill-decode runs take 741, "
                "so this reading was taken, after a look at the modes with the other",
            ),
            Given("SWE: observations of 215 tokens", "inferred", OBSERVATION_RULE),
            Given("SWE: reset, median 15 s, sigma 0.7", "fitted", "§3.3: reset, 14.6 % of 365.7 s"),
            Given(
                "SWE: step, median 0.58 s; reward, median 2 s",
                "fitted",
                "§3.3: the rest, 8.5 % of 365.7 s; how it divides is inferred",
            ),
        ),
    ),
    "webshop": Profile(
        DomainWorkload(
            prompt_tokens=constant(1000),
            turns=uniform(5, 30),
            response_tokens=lognormal(132, SPREAD),
            observation_tokens=lognormal(800, SPREAD),
            reset_s=lognormal(1.0, 0.7),
            step_s=lognormal(0.5, SPREAD),
        ),
        "h800",
        (
            Given("WebShop: 5 to 30 turns", "published", "Table 1; uniform between is inferred"),
            Given("WebShop: prompts of 1,000 tokens, responses of 150", "inferred", "a thought and a click"),
            Given("WebShop: observations of 907 tokens", "inferred", OBSERVATION_RULE),
            Given("WebShop: step, median 0.5 s", "inferred", "a search server"),
        ),
    ),
    "frozen_lake": Profile(
        DomainWorkload(
            prompt_tokens=constant(500),
            turns=uniform(20, 100),
            response_tokens=lognormal(56, SPREAD, most=128),
            observation_tokens=lognormal(230, SPREAD),
            reset_s=lognormal(1.0, 0.7),
            step_s=lognormal(0.13, SPREAD),
        ),
        "h800",
        (
            Given("FrozenLake: 20 to 100 turns", "published", "Table 1; uniform between is inferred"),
            Given(
                "FrozenLake: at most 128 tokens a response, mean 61",
                "inferred",
                "128 is max_tokens_per_step in ROLL's examples",
            ),
            Given("FrozenLake: observations of 261 tokens", "inferred", OBSERVATION_RULE),
            Given("FrozenLake: step, median 0.13 s", "inferred", "as SWE's"),
        ),
    ),
    "gem_math": Profile(
        DomainWorkload(
            prompt_tokens=constant(300),
            turns=uniform(1, 4),
            response_tokens=lognormal(1500, SPREAD),
            observation_tokens=lognormal(100, SPREAD),
            reset_s=lognormal(1.0, 0.7),
            step_s=lognormal(0.5, SPREAD),
            reward_s=lognormal(0.39, SPREAD),
        ),
        "h20",
        (
            Given("GEM-math: 1 to 4 turns", "published", "Table 1 (below 5); uniform is inferred"),
            Given(
                "GEM-math: responses of 1,700 tokens a turn",
                "inferred",
                "Qwen3's thinking on competition problems, about 4,000 tokens an answer",
            ),
            Given("GEM-math: step, median 0.5 s", "inferred", "a Python tool"),
            Given(
                "GEM-math: reward, mean 0.44 s of a GPU",
                "inferred",
                "R3: 5.8 % of 4 GPUs in 158 s for 84 trajectories",
            ),
        ),
    ),
    "gem_game": Profile(
        DomainWorkload(
            prompt_tokens=constant(300),
            turns=constant(1),
            response_tokens=lognormal(8000, SPREAD),
            reset_s=lognormal(1.0, 0.7),
            step_s=lognormal(0.13, SPREAD),
        ),
        "h20",
        (
            Given("GEM-game: 1 turn", "published", "Table 1"),
            Given(
                "GEM-game: responses of 9,100 tokens",
                "fitted",
                "Table 4: at 14B a rollout lasts about as long as training, push and pull, since the push "
                "and most of the pull are hidden behind it; set after a first look at the modes with a "
                "third of it, in which pushes were exposed",
            ),
        ),
    ),
}

DOMAINS: dict[str, DomainWorkload] = {name: profile.workload for name, profile in PROFILES.items()}

MAIN: dict[str, tuple[str, ...]] = {
    "8B": ("webshop", "frozen_lake", "gem_math", "gem_game"),
    "14B": ("webshop", "frozen_lake", "gem_math", "gem_game"),
    "32B": ("swe", "webshop", "frozen_lake", "gem_math", "gem_game"),
}
"""Domains of the main runs by model: SWE in 32B only (§7.1)."""


def givens_of(domains: Iterable[str]) -> tuple[Given, ...]:
    """Where every number of these domains' workloads is from."""
    own = [given for name in domains for given in PROFILES[name].givens]
    failures = FAILURES if "swe" in domains else ()
    light = [_LIGHT_RESET] if any(name != "swe" for name in domains) else []
    return (*own, *light, *failures, _SPREAD, _SHARE)


def affinity_of(domains: Iterable[str]) -> dict[str, str]:
    """RollArt's binding: prefill-heavy domains to H800, decode-heavy ones to H20 (§5.1)."""
    return {name: PROFILES[name].pool for name in domains}


def campaign_of(
    domains: Sequence[str],
    *,
    groups: int,
    group_size: int,
    steps: int,
    mode: ModeName = "tutti",
    alpha: int | None = None,
    redundancy: tuple[int, int] = (0, 0),
    context: int = CONTEXT,
    seed: int = 0,
    affinity: Mapping[str, str] | None = None,
    pools: Mapping[str, str] | None = None,
    **train: Any,
) -> Campaign:
    """A campaign whose trajectories end as the workload says, cut by the context only.

    Domains are drawn uniformly. `alpha` is 0 in modes sync and sync_plus and else 1, where nothing is given.
    `redundancy` is (extra groups, extra members of each). With `affinity` (domain -> pool), `pools` are the
    cluster's rollout pools with their hardware.
    """
    batch = (groups + redundancy[0]) * (group_size + redundancy[1])
    if alpha is None:
        alpha = 0 if mode in ("sync", "sync_plus") else 1
    domain = {
        "source": "simulated",
        "max_turns": 10_000,
        "max_turn_tokens": context - 1,
        "max_tokens": context,
        **{f"{what}_limit_s": 36_000.0 for what in ("reset", "step", "reward")},
    }
    return Campaign.parse(
        {
            "name": "rollart",
            "seed": seed,
            "model": {"build": {"max_context": context}},
            "domains": dict.fromkeys(domains, domain),
            "rollout": {
                "generate_limit_s": 360_000.0,
                "progress_every_s": 36_000.0,
                "heartbeat_limit_s": 36_000.0,
                "update_limit_s": 36_000.0,
                "engine": {"kind": "simulated", "workers": max(len(pools or {}), 1)},
            },
            "environment": {
                "concurrent_trajectories": max(batch * (alpha + 2), 1),
                "failure_budget": 1_000_000,
            },
            "affinity": {"domains": dict(affinity or {}), "local_pools": dict(pools or {})},
            "train": {
                "steps": steps,
                "groups": groups,
                "group_size": group_size,
                "mode": mode,
                "alpha": alpha,
                "redundancy": {"groups": redundancy[0], "members": redundancy[1]},
                "algorithm": {"zero_variance": "keep"},
                "trainer": {"micro_batch_tokens": 2 * context},
                "checkpoint": {"every": max(steps, 1)},
                **train,
            },
        }
    )
