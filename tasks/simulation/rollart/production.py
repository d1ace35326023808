"""RollArt's production week (§3.3): over 3,000 GPUs, a mixture model of hundreds of billions, alpha 1.

The paper says what the week looked like and not what ran: domains, latencies and batch are ours, chosen so
that turns and lengths have the published means, tails and limits. What is judged is what the control plane
makes of them: idle time and its cost.

`production_campaign` and `production_cluster` are also what the simulator's speed is measured on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from infra.performance.distributions import Distribution, Tail
from tasks.campaign import Campaign
from tasks.simulation.cluster import ClusterConfig
from tasks.simulation.result import SimulationResult
from tasks.simulation.rollart.claims import Given, Row, rests_on
from tasks.simulation.rollart.clusters import FUNCTIONS, HARDWARE, cluster_of, engines
from tasks.simulation.rollart.workloads import campaign_of, lognormal, uniform
from tasks.simulation.run import simulate
from tasks.simulation.workload import DomainWorkload

MODEL = "qwen3-235b-a22b"
PROMPT, RESPONSE = 12_288, 47_104
"""§3.3: prompts of at most 12k tokens, responses of at most 46k."""
TRAINING, GENERATING = 512, 2560
"""GPUs at full size: 3,072, one of six trains."""
ENGINE = 8
GROUPS, GROUP_SIZE = 512, 8
SMALLEST_PART = 8
"""At most this divides the full size: on fewer GPUs the model cannot be trained."""

WEEK: dict[str, DomainWorkload] = {
    "math": DomainWorkload(
        prompt_tokens=lognormal(300, 0.8, most=PROMPT),
        response_tokens=lognormal(4500, 0.62, most=RESPONSE),
        reward_s=lognormal(0.5, 0.6),
    ),
    "tools": DomainWorkload(
        prompt_tokens=lognormal(900, 0.8, most=PROMPT),
        turns=lognormal(1.2, 0.4, tail=Tail(probability=0.003, of=uniform(60, 100))),
        response_tokens=lognormal(250, 0.5),
        observation_tokens=lognormal(120, 0.5),
        step_s=lognormal(1.0, 1.0),
        reward_s=lognormal(0.5, 0.6),
    ),
    "search": DomainWorkload(
        prompt_tokens=lognormal(600, 0.8, most=PROMPT),
        turns=lognormal(5, 0.6, most=40),
        response_tokens=lognormal(350, 0.5),
        observation_tokens=lognormal(700, 0.5),
        step_s=lognormal(2.0, 1.0),
        reward_s=lognormal(0.5, 0.6),
    ),
    "web": DomainWorkload(
        prompt_tokens=lognormal(1200, 0.8, most=PROMPT),
        turns=lognormal(15, 0.5, most=60),
        response_tokens=lognormal(150, 0.5),
        observation_tokens=lognormal(700, 0.5),
        reset_s=lognormal(5, 0.7),
        step_s=lognormal(1.0, 1.0),
    ),
    "swe": DomainWorkload(
        prompt_tokens=lognormal(3000, 0.5, most=PROMPT),
        turns=lognormal(45, 0.35, most=100),
        response_tokens=lognormal(220, 0.5),
        observation_tokens=lognormal(400, 0.5),
        reset_s=lognormal(20, 0.7, tail=Tail(probability=0.001, of=uniform(200, 900))),
        step_s=lognormal(3.0, 1.0, tail=Tail(probability=0.0002, of=uniform(300, 1800))),
        reward_s=lognormal(60, 0.6),
    ),
}
"""Five domains, from one turn to 48."""

GIVENS = (
    Given("more than 3,000 GPUs, train to generation 1 to 5, alpha 1", "published", "§3.3"),
    Given(
        f"{TRAINING} H800 train, {GENERATING} H20 generate", "inferred", "hardware and number are unstated"
    ),
    Given("Qwen3-235B-A22B, engines of TP 8", "inferred", "hundreds of billions of parameters, a mixture"),
    Given(f"batch of {GROUPS} groups of {GROUP_SIZE}", "inferred", "unstated"),
    Given("prompts at most 12k, responses at most 46k tokens", "published", "§3.3"),
    Given("mean turns from 1 to 48 by domain", "published", "§3.3"),
    Given("spread of turns and lengths", "fitted", "§3.3: longest response 5 to 9x, turns 40x the mean"),
    Given("latencies of environments and rewards, tails of minutes", "inferred", "§3.3: resets of minutes"),
    Given("each node pushes and pulls its part of the weights at Table 4's rates", "inferred", "undisclosed"),
)


def production_campaign(part: int = 1, steps: int = 2, seed: int = 0, groups: int = GROUPS) -> Campaign:
    """The week's campaign at 1/`part` of its size; `groups` are those of a batch at full size."""
    return campaign_of(
        tuple(WEEK),
        groups=groups // part,
        group_size=GROUP_SIZE,
        steps=steps,
        context=PROMPT + RESPONSE,
        seed=seed,
    )


def production_cluster(
    part: int = 1,
    *,
    training: int = TRAINING,
    generating: int = GENERATING,
    prefix_cache: bool = True,
    workload: Mapping[str, DomainWorkload] = WEEK,
) -> ClusterConfig:
    """Its cluster at 1/`part` of its size: engines and their load are the same at every size."""
    training, generating = training // part, generating // part
    nodes = max(training // 8, 1)
    return cluster_of(
        MODEL,
        train=("h800", training),
        rollout=[engines("h20", generating, ENGINE, expert_parallel=ENGINE, prefix_cache=prefix_cache)],
        domains=(),
        # Full size, whatever part is simulated: the model is as large.
        weights={
            "transport": "mooncake",
            "latency_s": 0.0,
            "push_gb_s": 0.45 * nodes * part,
            "pull_gb_s": 2.1 * ENGINE,
        },
        reward=FUNCTIONS,
        workload={name: domain.model_dump(exclude_none=True) for name, domain in workload.items()},
    )


def idle_shares(result: SimulationResult) -> list[float]:
    """Of each step after the warm-up: the share in which the trainer waits for its batch."""
    working = ("train_step", "suspend", "update", "resume", "checkpoint")
    return [
        1 - sum(row.get(f"seconds/{stage}", 0.0) for stage in working) / row["seconds/step"]
        for row in result.steps
    ]


LARGER = 2
"""Times the batch, to see what it would change that the batch is not published."""


@dataclass(frozen=True, slots=True)
class Length:
    part: int
    steps: int
    others: bool
    """Whether a larger batch and the untuned cluster are simulated too."""


FULL = Length(part=8, steps=5, others=True)
QUICK = Length(part=8, steps=2, others=False)


def measure(length: Length, groups: int = GROUPS, **cluster: Any) -> SimulationResult:
    steps = length.steps if groups == GROUPS and not cluster else min(length.steps, 3)
    campaign = production_campaign(length.part, steps, groups=groups)
    # The batches of the first two steps are begun together: alpha is 1.
    return simulate(campaign, production_cluster(length.part, **cluster), warm_up_steps=min(2, steps - 1))


def _extent(workload: DomainWorkload, what: str, draws: int) -> tuple[float, float]:
    """(mean, about the largest of so many draws) of a domain's turns, or tokens of a response."""
    distribution: Distribution = getattr(workload, what)
    return distribution.mean, distribution.quantile(1 - 1 / draws)


def shape_rows() -> list[Row]:
    """What was put in, so that a reader sees that it is the published week's."""
    draws = GROUPS * GROUP_SIZE // len(WEEK) * 100
    turns = {name: _extent(domain, "turns", draws) for name, domain in WEEK.items()}
    responses = {name: _extent(domain, "response_tokens", draws // 100) for name, domain in WEEK.items()}
    put_in = rests_on(GIVENS)
    condition = "five domains of ours"
    return [
        Row("mean turns of a domain, least", condition, 1.0, min(mean for mean, _ in turns.values()), put_in),
        Row("mean turns of a domain, most", condition, 48.0, max(mean for mean, _ in turns.values()), put_in),
        Row(
            "most turns over a domain's mean",
            "100 steps",
            40.0,
            max(most / mean for mean, most in turns.values()),
            put_in,
            relation="at least",
        ),
        Row(
            "longest response over a domain's mean",
            "one step",
            5.0,
            max(most / mean for mean, most in responses.values()),
            put_in,
            "the longest of the week is 9 times its mean",
            "at least",
        ),
    ]


def idle_rows(result: SimulationResult, larger: SimulationResult | None) -> list[Row]:
    """What the control plane makes of the week."""
    idle = idle_shares(result)
    seconds = [row["seconds/step"] for row in result.steps]
    condition = f"batch of {GROUPS * GROUP_SIZE}"
    basis = rests_on(HARDWARE, GIVENS)
    note = (
        f"ours: steps of {min(seconds):,.0f} to {max(seconds):,.0f} s, of which training takes "
        f"{result.stage_seconds['train_step']:,.0f}. Batch and latencies are not published: with ours "
        "a step is bound by its longest trajectories, while the trainer has little to do"
    )
    if larger is not None:
        note += (
            f". At {LARGER} times the batch the trainer waits {fmean(idle_shares(larger)):.0%} of a step of "
            f"{larger.step_seconds:,.0f} s"
        )
    return [
        Row("trainer's wait for a batch, most of an iteration", condition, 0.62, max(idle), basis, note),
        Row("what no wait would save of step time", condition, 0.22, fmean(idle), basis, note),
        Row("longest iteration, s", condition, 5400.0, max(seconds), basis, note),
    ]


def tuning_row(tuned: SimulationResult, untuned: SimulationResult) -> Row:
    return Row(
        "tuning the ratio of train to generation and the prefix cache, step time",
        "from 1 to 1 without prefix cache, to 1 to 5 with",
        1.66,
        untuned.step_seconds / tuned.step_seconds,
        rests_on(HARDWARE, GIVENS, Given("before: 1 to 1, no prefix cache", "inferred", "not described")),
        "what was tuned from is not published",
    )


def rows(quick: bool = False) -> list[Row]:
    length = QUICK if quick else FULL
    result = measure(length)
    if not length.others:
        return [*shape_rows(), *idle_rows(result, None)]
    half = (TRAINING + GENERATING) // 2
    untuned = measure(length, training=half, generating=half, prefix_cache=False)
    larger = measure(length, groups=LARGER * GROUPS)
    return [*shape_rows(), *idle_rows(result, larger), tuning_row(result, untuned)]
