import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.report.intervals import Interval, mean_interval, separated


def test_is_the_wilson_interval_for_successes_and_failures():
    # 8 of 10: the textbook example, [0.4902, 0.9433].
    interval = mean_interval([1] * 8 + [0] * 2, (0, 1))
    assert interval.mean == pytest.approx(0.8)
    assert interval.low == pytest.approx(0.490162, abs=1e-6)
    assert interval.high == pytest.approx(0.943318, abs=1e-6)
    assert interval.episodes == 10


def test_is_not_degenerate_when_every_reward_is_the_lowest_or_the_highest():
    # n / (n + z^2) = 200 / 203.841459 bounds the mean of 200 successes from below.
    assert mean_interval([1] * 200, (0, 1)).low == pytest.approx(0.981155, abs=1e-6)
    assert mean_interval([1] * 200, (0, 1)).high == 1.0
    assert mean_interval([0] * 200, (0, 1)).low == 0.0
    assert mean_interval([0] * 200, (0, 1)).high == pytest.approx(0.018845, abs=1e-6)


def test_rescales_to_the_range_of_the_reward():
    # As 8 of 10, mapped by r = 2 p - 1.
    interval = mean_interval([1] * 8 + [-1] * 2, (-1, 1))
    assert interval.mean == pytest.approx(0.6)
    assert interval.low == pytest.approx(2 * 0.490162 - 1, abs=2e-6)
    assert interval.high == pytest.approx(2 * 0.943318 - 1, abs=2e-6)


def test_depends_on_partial_rewards_through_their_mean_alone():
    assert mean_interval([0.5] * 40, (0, 1)) == mean_interval([0, 1] * 20, (0, 1))


def test_of_no_reward_nothing_is_known():
    interval = mean_interval([], (-1, 2))
    assert math.isnan(interval.mean)
    assert (interval.low, interval.high, interval.episodes) == (-1, 2, 0)


def test_names_the_option_when_a_reward_is_out_of_range():
    with pytest.raises(ValueError, match="reward_range"):
        mean_interval([0.2, 1.5], (0, 1))
    with pytest.raises(ValueError, match="reward_range"):
        mean_interval([0.2], (1, 1))


@given(
    rewards=st.lists(st.floats(-3, 5), min_size=1, max_size=60),
    lowest=st.floats(-10, -3),
    highest=st.floats(5, 10),
)
def test_stays_in_range_around_the_mean_and_never_has_length_zero(rewards, lowest, highest):
    interval = mean_interval(rewards, (lowest, highest))
    rounding = 1e-9
    assert lowest - rounding <= interval.low <= interval.mean + rounding
    assert interval.mean - rounding <= interval.high <= highest + rounding
    assert interval.low < interval.high


@given(rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=40))
def test_more_of_the_same_is_surer(rewards):
    once, tenfold = mean_interval(rewards, (0, 1)), mean_interval(rewards * 10, (0, 1))
    assert tenfold.high - tenfold.low < once.high - once.low


def test_separated_means_no_common_point():
    low, high = Interval(0.1, 0.0, 0.2, 9), Interval(0.4, 0.3, 0.5, 9)
    assert separated(low, high)
    assert separated(high, low)
    assert not separated(low, Interval(0.25, 0.2, 0.3, 9))
    assert not separated(Interval(0.25, 0.0, 1.0, 9), high)
