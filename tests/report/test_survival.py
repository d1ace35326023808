import numpy as np
import pytest

from tasks.report.survival import mean_length, means_beyond, quantile, survival

# Lengths 1, 2+, 3, 4+, 5 (+ is cut short). By hand: 4/5 outlive 1; of the three at risk at 3 two outlive it,
# 8/15; the one at risk at 5 ends there.
LENGTHS = np.array([1.0, 2, 3, 4, 5])
COMPLETE = np.array([1.0, 0, 1, 0, 1])
CUT = np.array([0.0, 1, 0, 1, 0])


def test_the_product_of_the_shares_that_did_not_end():
    shares = survival(COMPLETE, CUT)
    assert shares == pytest.approx([4 / 5, 4 / 5, 8 / 15, 8 / 15, 0])
    # 1/5 end at 1, 4/15 at 3, 8/15 at 5.
    assert mean_length(LENGTHS, shares) == pytest.approx(1 / 5 + 3 * 4 / 15 + 5 * 8 / 15)
    assert [quantile(LENGTHS, shares, level) for level in (0.1, 0.2, 0.4, 0.5)] == [1, 1, 3, 5]


def test_what_is_longer_than_a_length_has_the_mean_of_the_rest():
    beyond = means_beyond(LENGTHS, survival(COMPLETE, CUT))
    rest = (3 * 4 / 15 + 5 * 8 / 15) / (12 / 15)
    assert beyond == pytest.approx([rest, rest, 5, 5, 5])


def test_without_any_that_were_cut_it_is_the_empirical_distribution():
    shares = survival(np.array([2.0, 1, 1]), np.zeros(3))
    assert shares == pytest.approx([0.5, 0.25, 0])


def test_those_cut_at_a_length_were_at_risk_of_ending_there():
    assert survival(np.array([1.0, 1]), np.array([1.0, 0])) == pytest.approx([2 / 3, 0])


def test_a_last_one_that_was_cut_ends_at_its_length():
    shares = survival(np.array([1.0, 0]), np.array([0.0, 1]))
    assert shares == pytest.approx([0.5, 0])
    assert mean_length(np.array([1.0, 3]), shares) == pytest.approx(2)


def test_many_samples_at_once_give_what_each_gives():
    both = survival(np.stack([COMPLETE, COMPLETE[::-1]]), np.stack([CUT, CUT[::-1]]))
    assert both[0] == pytest.approx(survival(COMPLETE, CUT))
    assert both[1] == pytest.approx(survival(COMPLETE[::-1], CUT[::-1]))
