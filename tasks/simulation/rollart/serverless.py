"""Rewards on functions against dedicated reward GPUs (R3, §7.3), and how little the latter do (§3.3).

A reward is one call of a 7B judge, whose time is that of the iteration model: the trajectory is prefilled, a
short verdict decoded. With functions the 4 reward GPUs of a job generate instead.
"""

from dataclasses import dataclass

from infra.hardware import hardware
from infra.models import model_of
from infra.performance.distributions import constant
from infra.performance.iteration import BatchWork, IterationModel
from tasks.simulation.result import SimulationResult
from tasks.simulation.rollart.claims import Given, Row, rests_on
from tasks.simulation.rollart.clusters import BREAKDOWN, DEDICATED, FUNCTIONS, HARDWARE, cluster_of, engines
from tasks.simulation.rollart.workloads import PROFILES, campaign_of
from tasks.simulation.run import simulate

JUDGE = "qwen2.5-7b"
VERDICT_TOKENS = 2
CONTEXT_16K = 16_384
JOBS = 3
GROUP_SIZE = 4
BATCH = 84

JUDGED = (
    Given("the judge is Qwen2.5-7B", "published", "§7.1"),
    Given("it answers YES or NO and nothing else", "published", "ROLL's Qwen2.5-7B-Instruct-RLVR-prompt"),
    Given(
        f"a reward: one H800 prefills the mean trajectory and decodes {VERDICT_TOKENS} tokens",
        "inferred",
        "time by the iteration model; what else the judge reads is not described",
    ),
)


def judge_seconds(trajectory_tokens: float) -> float:
    """Of one reward on one H800 that judges nothing else meanwhile."""
    judge = IterationModel(model_of(JUDGE), hardware("h800"))
    tokens = round(trajectory_tokens)
    prefill = BatchWork(0, 0, prefill_tokens=tokens, prefill_attended=tokens * tokens / 2, prefills=1)
    return judge.seconds(prefill) + judge.decode_seconds(1, tokens, VERDICT_TOKENS)


def mean_tokens(domain: str) -> float:
    """Of a trajectory: prompt, responses and observations, no budget applied."""
    workload = PROFILES[domain].workload
    turns = workload.turns.mean
    return (
        workload.prompt_tokens.mean
        + turns * workload.response_tokens.mean
        + (turns - 1) * workload.observation_tokens.mean
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """What a batch of 84 may mean."""

    name: str
    groups: int
    group_size: int


TRAJECTORIES = Reading("84 trajectories", BATCH // GROUP_SIZE, GROUP_SIZE)
PROMPTS = Reading("84 prompts of 8", BATCH, 8)


def math_job(reading: Reading, functions: bool, steps: int, seed: int) -> SimulationResult:
    """One job on its 16 H800: 8 train, and 8 generate or 4 generate and 4 judge."""
    workload = PROFILES["gem_math"].workload.model_copy(
        update={"reward_s": constant(judge_seconds(mean_tokens("gem_math")))}
    )
    cluster = cluster_of(
        "8B",
        train=("h800", 8),
        rollout=[engines("h800", 8 if functions else 4, 1)],
        reward=FUNCTIONS if functions else DEDICATED,
        domains=["gem_math"],
        workload={"gem_math": workload.model_dump(exclude_none=True)},
    )
    campaign = campaign_of(
        ["gem_math"],
        groups=reading.groups,
        group_size=reading.group_size,
        steps=steps,
        mode="sync_plus",
        context=CONTEXT_16K,
        seed=seed,
    )
    return simulate(campaign, cluster, warm_up_steps=0)


def _mean(results: list[SimulationResult], metric: str) -> float:
    found = [row[metric] for result in results for row in result.rows if metric in row]
    return sum(found) / len(found)


def r3_rows(reading: Reading, jobs: int, steps: int) -> list[Row]:
    dedicated = [math_job(reading, False, steps, seed) for seed in range(jobs)]
    functions = [math_job(reading, True, steps, seed) for seed in range(jobs)]
    basis = rests_on(
        HARDWARE,
        Given("16 H800, 3 math jobs, 8B, 16k, batch 84; 8 train, 4 + 4 or 8 generate", "published", "§7.3"),
        Given(f"{reading.name}; each job has 16 H800", "inferred", "unstated: both readings are given"),
        Given("utilisation of functions: time with work over time paid", "inferred", "undefined"),
        JUDGED,
        Given("function: cold start 1 s", "inferred", "undisclosed in the paper"),
        PROFILES["gem_math"].givens[:-1],
    )
    busy = "the judge says no more than YES or NO (ROLL); how long the published one reads is unknown"
    bound = (
        "ours is bound by its longest trajectories in either reading, which more GPUs hardly shorten: to "
        "halve a rollout by twice the GPUs it must be bound by their throughput"
    )
    condition = f"{reading.name}, {jobs} jobs"
    seconds = {
        name: sum(each.stage_seconds["get_batch"] for each in results) / len(results)
        for name, results in (("4 + 4", dedicated), ("8", functions))
    }
    return [
        Row(
            "utilisation of dedicated reward GPUs",
            condition,
            0.058,
            _mean(dedicated, "reward/utilisation"),
            basis,
            busy,
        ),
        Row(
            "utilisation of functions",
            condition,
            0.88,
            _mean(functions, "reward/function_utilisation"),
            basis,
        ),
        Row("rollout with 4 + 4 GPUs, s", condition, 158.0, seconds["4 + 4"], basis, bound),
        Row("rollout with 8 GPUs and functions, s", condition, 77.0, seconds["8"], basis, bound),
        Row("rollout, 4 + 4 over 8 GPUs", condition, 158 / 77, seconds["4 + 4"] / seconds["8"], basis, bound),
    ]


def swe_row(groups: int, steps: int) -> Row:
    """§3.3: 28 H800 generate and 4 judge."""
    workload = PROFILES["swe"].workload.model_copy(
        update={"reward_s": constant(judge_seconds(mean_tokens("swe")))}
    )
    cluster = cluster_of(
        "8B",
        train=("h800", 28),
        rollout=[engines("h800", 28, 1)],
        colocated=True,
        coefficients=BREAKDOWN,
        reward=DEDICATED,
        domains=["swe"],
        workload={"swe": workload.model_dump(exclude_none=True)},
    )
    campaign = campaign_of(["swe"], groups=groups, group_size=8, steps=steps, mode="sync_plus")
    return Row(
        "utilisation of dedicated reward GPUs",
        "SWE, 8B, 28 + 4 H800, batch 128",
        0.074,
        _mean([simulate(campaign, cluster, warm_up_steps=0)], "reward/utilisation"),
        rests_on(
            HARDWARE,
            Given("4 H800 judge, 28 generate", "published", "§3.3"),
            Given("mode sync_plus, as the step of §3.3", "inferred", "same section"),
            JUDGED,
            PROFILES["swe"].givens,
        ),
        "a judged trajectory is as long as SWE's lengths say, which are fitted, as is the step",
    )


def rows(quick: bool = False) -> list[Row]:
    if quick:
        return r3_rows(TRAJECTORIES, 1, 1)
    return [*r3_rows(TRAJECTORIES, JOBS, 2), *r3_rows(PROMPTS, JOBS, 1), swe_row(16, 1)]
