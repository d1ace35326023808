import math

import numpy as np
import pytest

from tasks.train.advantages import NonFiniteReward, group_advantages, has_signal


def test_grpo_divides_centred_rewards_by_the_population_deviation() -> None:
    # mean 1/4, centred (3/4, -1/4, -1/4, -1/4), variance 3/16.
    expected = [math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)]
    np.testing.assert_allclose(group_advantages([1, 0, 0, 0]), expected, rtol=1e-12)


def test_ddof_one_divides_by_the_sample_deviation() -> None:
    # variance (3/4) / 3 = 1/4.
    np.testing.assert_allclose(group_advantages([1, 0, 0, 0], ddof=1), [1.5, -0.5, -0.5, -0.5], rtol=1e-12)


def test_mean_only_keeps_the_scale_of_rewards() -> None:
    np.testing.assert_allclose(
        group_advantages([1, 0, 0, 0], normalise_by_std=False), [0.75, -0.25, -0.25, -0.25], rtol=1e-12
    )


# In float32 (r - mean) / (std + 1e-6) gives 0.029, 0.056 and 0.106 for these.
@pytest.mark.parametrize(("reward", "members"), [(0.3, 7), (0.7, 7), (0.7, 16), (0.1, 3), (1e30, 5)])
@pytest.mark.parametrize("normalise", [True, False])
def test_equal_rewards_give_exactly_zero_whatever_their_mean_rounds_to(
    reward: float, members: int, normalise: bool
) -> None:
    rewards = [reward] * members
    assert group_advantages(rewards, normalise_by_std=normalise, std_floor=1e-12).tolist() == [0.0] * members
    assert not has_signal(rewards)


def test_equal_float32_rewards_give_exactly_zero() -> None:
    rewards = np.full(7, 0.3, dtype=np.float32)
    assert group_advantages(rewards.tolist()).tolist() == [0.0] * 7


@pytest.mark.parametrize(
    ("low", "high"),
    # Leave-one-out deviations by E[x²] - E[x]² give advantages of 3986 and 8017 for the first two.
    [(0.35, 0.95), (0.3, 1.0), (0.5, 1.0)],
)
def test_one_outlier_of_eight_has_advantage_root_seven(low: float, high: float) -> None:
    expected = [-1 / math.sqrt(7)] * 7 + [math.sqrt(7)]
    np.testing.assert_allclose(group_advantages([low] * 7 + [high]), expected, rtol=1e-12)


def test_a_large_common_offset_does_not_change_advantages() -> None:
    expected = group_advantages([0.0, 1.0, 2.0, 5.0])
    np.testing.assert_allclose(group_advantages([1e6, 1e6 + 1, 1e6 + 2, 1e6 + 5]), expected, rtol=1e-9)


def test_the_floor_keeps_near_ties_small() -> None:
    # centred ±5e-5 over the floor 1e-2.
    np.testing.assert_allclose(group_advantages([0.5, 0.5001], std_floor=1e-2), [-5e-3, 5e-3], rtol=1e-9)


def test_a_single_survivor_has_no_advantage() -> None:
    assert group_advantages([0.7]).tolist() == [0.0]
    assert group_advantages([0.7], ddof=1).tolist() == [0.0]
    assert not has_signal([0.7])


def test_an_empty_group_has_no_advantages() -> None:
    assert group_advantages([]).size == 0
    assert not has_signal([])


def test_two_different_rewards_are_a_signal() -> None:
    assert has_signal([0.0, 0.0, 1.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_a_typed_error(bad: float) -> None:
    with pytest.raises(NonFiniteReward, match="reward"):
        group_advantages([0.0, bad, 1.0])
    with pytest.raises(NonFiniteReward):
        has_signal([bad, bad])


def test_a_ddof_without_freedom_is_refused() -> None:
    with pytest.raises(ValueError, match="ddof"):
        group_advantages([0.0, 1.0], ddof=2)
