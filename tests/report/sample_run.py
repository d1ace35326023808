"""A run's folder as a run leaves it, written through `RunFiles`, for tests of what a person sees."""

import math
import random
from pathlib import Path

from tasks.report.intervals import mean_interval
from tasks.report.run_files import RunFiles

CAMPAIGN = """\
name: frozen-lake-and-chains
seed: 7
model: {path: null}
domains:
  game:
    source: gymnasium
    options: {id: FrozenLake-v1, is_slippery: false}
    reward_range: [0.0, 1.0]
  math:
    source: reasoning_gym
    options: {name: chain_sum}
    reward_range: [-1.0, 1.0]
train: {steps: 80, mode: tutti, alpha: 1, groups: 8, group_size: 8, algorithm: {kind: grpo}}
"""


def write_sample_run(folder: Path, steps: int, *, evaluated: bool = True) -> RunFiles:
    """Two domains that learn at different speeds, in mode `tutti` with staleness up to 2."""
    files = RunFiles(folder).create()
    files.write_campaign(CAMPAIGN)
    dice = random.Random(5)
    clock = 0.0
    if evaluated:
        files.append_span("evaluation", "evaluate", 0, 0.0, 6.5)
        clock = 6.5
    for step in range(steps):
        clock = _write_step(files, dice, step, clock)
    if evaluated and steps:
        files.append_span("evaluation", "evaluate", steps, clock, clock + 6.1)
    if evaluated:
        _write_evaluation(files, dice)
    return files


def _write_step(files: RunFiles, dice: random.Random, step: int, start: float) -> float:
    durations = {
        "get_batch": dice.uniform(0.3, 1.4),
        "suspend": dice.uniform(0.02, 0.05),
        "update": dice.uniform(0.1, 0.25),
        "resume": dice.uniform(0.01, 0.03),
        "train_step": dice.uniform(1.1, 1.5),
    }
    clock = start
    for stage, seconds in durations.items():
        lane = "trainer" if stage in ("get_batch", "train_step") else "control"
        files.append_span(lane, stage, step, clock, clock + seconds)
        if stage == "get_batch":
            files.append_span("engine", "generate", step, start, clock + seconds)
        if stage == "train_step":
            files.append_span("engine", "recompute", step, clock, clock + 0.18)
            files.append_span("engine", "generate", step, clock + 0.18, clock + seconds)
        clock += seconds
    publish = dice.uniform(0.2, 0.5)
    files.append_span("weights", "publish", step, clock, clock + publish)
    files.append_span("weights", "checkpoint", step, clock + publish, clock + publish + 0.2)
    stale = min(step, 2)
    histogram = [0] * (stale + 1)
    for _ in range(64):
        histogram[min(int(dice.expovariate(1.1)), stale)] += 1
    sampled = dice.randint(5200, 6100)
    wasted = {"cancelled": dice.randint(0, 260), "stale": dice.randint(0, 60) if step > 2 else 0}
    wasted["zero_variance"] = int(sampled * dice.uniform(0.1, 0.2) * (1 + step / 60))
    files.append_metrics(
        {
            "step": step,
            "version": step + 1,
            "time": clock,
            "trajectories": 64,
            "groups": 8,
            "groups/zero_variance": dice.randint(0, 3),
            "groups/short": 0,
            "reward/game/mean": 0.9 / (1 + math.exp(-(step - 30) / 8)) + dice.gauss(0, 0.05),
            "reward/game/count": 32,
            "reward/math/mean": -0.6 + 1.2 * (1 - math.exp(-step / 40)) + dice.gauss(0, 0.09),
            "reward/math/count": 32,
            "staleness/histogram": histogram,
            "staleness/tokens": [90 * count for count in histogram],
            "staleness/turns": [4 * count for count in histogram],
            "staleness/mixed_share": 0.0 if step == 0 else dice.uniform(0.1, 0.3),
            "tokens/trained": sampled - sum(wasted.values()),
            "tokens/sampled": sampled,
            **{f"tokens/wasted/{reason}": tokens for reason, tokens in wasted.items()},
            **{
                f"waste/{domain}/{reason}": tokens * share // 100
                for reason, tokens in wasted.items()
                for domain, share in (("game", 70), ("math", 30))
            },
            **{f"context/wasted/{reason}": tokens * 3 for reason, tokens in wasted.items()},
            "context/trained": 9000,
            "tokens/recomputed": dice.randint(100, 900),
            "reward/workers": 1,
            "reward/calls": 64,
            "reward/busy_seconds": 0.064 * (clock - start),
            "reward/utilisation": 0.064,
            "reward/latency_p50": dice.uniform(0.001, 0.002),
            "reward/latency_p99": dice.uniform(0.004, 0.02),
            **{f"seconds/{stage}": seconds for stage, seconds in durations.items()},
            "seconds/publish": publish,
            "seconds/step": clock - start,
            "train/loss": dice.gauss(0, 0.02),
            "train/gradient_norm": math.nan if step == 5 else 0.4 + dice.expovariate(6),
            "train/entropy": 2.2 * math.exp(-step / 50) + dice.gauss(0, 0.03),
            "train/importance_weight_mean": 1 + dice.gauss(0, 0.02),
            "train/importance_weight_max": 1.4 + dice.expovariate(2),
            "train/clip_fraction": abs(dice.gauss(0.03, 0.01)),
            "train/learning_rate": min(step / 10, 1) * 1e-3,
            "rollout/turns": 300 + dice.randint(-20, 20),
            "rollout/tokens_per_second": sampled / (clock - start),
            "episode/game/turns": 6 + dice.gauss(0, 0.5),
            "episode/math/turns": 1,
            "episode/game/tokens": 180 + dice.gauss(0, 10),
            "episode/math/tokens": 44 + dice.gauss(0, 3),
            "outcomes/terminated": 52,
            "outcomes/max_turns": 10,
            "outcomes/cancelled": dice.randint(0, 4),
        }
    )
    files.append_ends([_end(dice, step, number) for number in range(72)])
    return clock


def _end(dice: random.Random, step: int, number: int) -> dict[str, object]:
    """Games are cancelled where they are long, so the accepted ones are short; sums are all alike."""
    game = number % 2 == 0
    tokens = round(dice.expovariate(1 / 60)) + 1 if game else dice.randint(3, 6)
    cancelled = game and tokens > 90 and dice.random() < 0.7
    fate = "cancelled" if cancelled else dice.choices(("trained", "zero_variance"), (9, 1))[0]
    return {
        "step": step,
        "key": f"g{step * 9 + number // 8:08d}-m{number % 8:03d}-a00",
        "group": step * 9 + number // 8,
        "domain": "game" if game else "math",
        "fate": fate,
        "stop": "cancelled" if cancelled else "terminated",
        "cut_short": cancelled,
        "outcome": "skip" if cancelled else "reward",
        "reward": None if cancelled else 1.0,
        "tokens": tokens + 40,
        "sampled_tokens": 90 if cancelled else tokens,
        "turns": min(tokens, 90) // 10 + 1 if game else 1,
        "seconds": 0.02 * min(tokens, 90) + dice.uniform(0, 0.1),
        "initiating_version": step,
        "oldest_version": step,
        "newest_version": step,
    }


def _write_evaluation(files: RunFiles, dice: random.Random) -> None:
    def game(chance: float) -> list[float]:
        return [float(dice.random() < chance) for _ in range(200)]

    def math_rewards(middle: float) -> list[float]:
        return [min(max(dice.gauss(middle, 0.5), -1), 1) for _ in range(200)]

    files.write_evaluation(
        {
            "game": mean_interval(game(0.03), (0, 1)),
            "math": mean_interval(math_rewards(0.0), (-1, 1)),
        },
        {
            "game": mean_interval(game(0.91), (0, 1)),
            "math": mean_interval(math_rewards(0.1), (-1, 1)),
        },
        temperature=1.0,
    )
