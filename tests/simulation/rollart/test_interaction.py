import numpy as np
import pytest

from infra.performance.distributions import constant
from tasks.simulation.rollart import interaction

TURNS, BATCH = 12, 32


def _ratio_without_compute(sigma: float) -> float:
    """Per-turn barrier over independent makespan of `TURNS` waits, by Monte Carlo in float64."""
    draws = np.random.default_rng(7).normal(interaction.MEAN_S, sigma, (400, BATCH, TURNS)).clip(0)
    return float((draws.max(axis=1).sum(axis=1) / draws.sum(axis=2).max(axis=1)).mean())


@pytest.mark.parametrize("sigma", [3, 10])
def test_with_hardly_any_compute_only_the_barrier_counts(sigma: int) -> None:
    workload = interaction.normal_steps(sigma).model_copy(
        update={
            "turns": constant(TURNS),
            "prompt_tokens": constant(16),
            "response_tokens": constant(1),
            "observation_tokens": constant(1),
        }
    )
    batched = interaction.rollout_seconds("swe", workload, "sync", BATCH, 2)
    ratio = batched / interaction.rollout_seconds("swe", workload, "sync_plus", BATCH, 2)
    # 2 batches against the mean of 400: the spread of one batch's ratio is some per cent.
    assert ratio == pytest.approx(_ratio_without_compute(sigma), rel=0.12)


def test_latencies_are_the_only_thing_that_is_varied() -> None:
    narrow, wide = interaction.normal_steps(1), interaction.normal_steps(10)
    assert narrow.model_copy(update={"step_s": wide.step_s}) == wide
    assert narrow.reset_s.is_zero
    assert narrow.reward_s.is_zero


@pytest.mark.slow
def test_a_wider_spread_gains_more() -> None:
    rows = interaction.rows(quick=True)
    assert [row.published for row in rows] == [1.23, 2.27]
    assert 1 < rows[0].ours < rows[1].ours
