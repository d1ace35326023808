import pytest

from tasks.simulation.rollart import serverless
from tasks.simulation.rollart.workloads import DOMAINS


def test_a_judge_reads_the_trajectory_at_the_compute_of_its_gpu() -> None:
    # 2 x 7.07e9 parameters outside the embeddings x 20,000 tokens / 989.5e12 is the least.
    least = 2 * 7.07e9 * 20_000 / 989.5e12
    assert least < serverless.judge_seconds(20_000) < 3 * least


def test_tokens_of_a_trajectory_are_counted_once() -> None:
    math = DOMAINS["gem_math"]
    by_hand = math.prompt_tokens.mean + 2.5 * math.response_tokens.mean + 1.5 * math.observation_tokens.mean
    assert math.turns.mean == pytest.approx(2.5)
    assert serverless.mean_tokens("gem_math") == pytest.approx(by_hand)


@pytest.mark.parametrize("reading", [serverless.TRAJECTORIES, serverless.PROMPTS])
def test_both_readings_of_84_are_84(reading: serverless.Reading) -> None:
    counts = {"84 trajectories": reading.groups * reading.group_size, "84 prompts of 8": reading.groups}
    assert counts[reading.name] == serverless.BATCH


def test_dedicated_gpus_are_as_busy_as_their_rewards_make_them() -> None:
    result = serverless.math_job(serverless.Reading("8", 2, 4), False, 2, seed=0)
    seconds = serverless.judge_seconds(serverless.mean_tokens("gem_math"))
    for row in result.rows:
        assert row["reward/busy_seconds"] == pytest.approx(row["reward/calls"] * seconds)
        assert row["reward/utilisation"] < 0.5
    assert result.rows[-1]["reward/calls"] >= 8


@pytest.mark.slow
def test_functions_are_paid_only_while_they_work_or_start() -> None:
    rows = {row.claim: row for row in serverless.rows(quick=True)}
    functions = rows["utilisation of functions"].ours
    assert rows["utilisation of dedicated reward GPUs"].ours < functions <= 1
