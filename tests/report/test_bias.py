"""Bias is found where it was put and not where there is none; the generated distribution is the true one."""

import numpy as np
import pytest

from tasks.report import bias
from tasks.train.ends import Fate


def end(group, fate, tokens, *, domain="game", cut_short=False, turns=1, seconds=1.0):
    return {
        "group": group,
        "domain": domain,
        "fate": fate.value,
        "cut_short": cut_short,
        "sampled_tokens": tokens,
        "turns": turns,
        "seconds": seconds,
    }


def first_of(dice, groups, wanted, started, mean=100.0):
    """Groups that end with their `wanted` shortest of `started` members of exponential lengths."""
    rows = []
    for group in range(groups):
        lengths = np.sort(np.ceil(dice.exponential(mean, started)))
        bound = lengths[wanted - 1]
        for place, length in enumerate(lengths):
            if place < wanted:
                rows.append(end(group, Fate.TRAINED, int(length)))
            else:
                rows.append(end(group, Fate.CANCELLED, int(bound), cut_short=True))
    return rows


def dropped_at_random(dice, groups, share=0.3, members=6):
    """Whole groups are dropped whatever their lengths; members of a group are alike."""
    rows = []
    for group in range(groups):
        fate = Fate.STALE if dice.random() < share else Fate.TRAINED
        mean = dice.uniform(40, 160)
        rows += [end(group, fate, int(np.ceil(dice.exponential(mean)))) for _ in range(members)]
    return rows


def of_tokens(comparisons):
    (found,) = [comparison for comparison in comparisons if comparison.measure == "sampled_tokens"]
    return found


def test_distance_and_means_by_hand():
    """Accepted 1, 1, 2, 2 (x 5); generated those and as many dropped of 3 and 4."""
    rows = [end(0, Fate.TRAINED, tokens) for tokens in (1, 1, 2, 2) * 5]
    rows += [end(1, Fate.STALE, tokens) for tokens in (3, 4, 3, 4) * 5]
    found = of_tokens(bias.compare(rows, resamples=9))
    assert (found.generated, found.accepted, found.cut_short) == (40, 20, 0)
    assert (found.accepted_mean, found.generated_mean) == (pytest.approx(1.5), pytest.approx(2.5))
    assert found.ratio == pytest.approx(0.6)
    assert found.distance == pytest.approx(0.5)  # at 2: all of the accepted, half of the generated
    assert found.accepted_quantiles == (1, 1, 2)
    assert found.generated_quantiles == (1, 2, 4)
    assert found.cause is Fate.STALE


def test_first_n_of_more_is_found_named_and_measured():
    found = bias.compare(first_of(np.random.default_rng(1), 150, 6, 9))
    tokens = of_tokens(found)
    # The mean of an exponential's 6 shortest of 9, over its mean: 1/6 of the sum of the order statistics.
    expected = sum(sum(1 / (9 - i) for i in range(k)) for k in range(1, 7)) / 6
    assert tokens.ratio == pytest.approx(expected, rel=0.12)
    assert tokens.p_value <= 0.001
    (sentence,) = bias.findings(found)
    assert sentence.startswith("Accepted trajectories of game are shorter than generated ones, by ")
    assert f"{1 - tokens.ratio:.0%} in sampled tokens (KS {tokens.distance:.2f}, p < 0.001)" in sentence
    assert "lower train.redundancy.members" in sentence


def test_lengths_so_far_of_the_cancelled_lead_to_the_true_mean():
    rows = first_of(np.random.default_rng(2), 400, 6, 9)
    complete = np.mean([row["sampled_tokens"] for row in rows if not row["cut_short"]])
    all_as_seen = np.mean([row["sampled_tokens"] for row in rows])
    true_mean = 100.5  # of an exponential of mean 100, rounded up
    assert complete < 0.7 * true_mean
    assert all_as_seen < 0.9 * true_mean
    assert of_tokens(bias.compare(rows, resamples=9)).generated_mean == pytest.approx(true_mean, rel=0.08)


def test_staleness_that_drops_long_ones_is_told_from_redundancy():
    dice = np.random.default_rng(3)
    rows = []
    for group in range(200):
        lengths = np.ceil(dice.exponential(100, 4)).astype(int)
        fate = Fate.STALE if lengths.max() > 200 else Fate.TRAINED
        rows += [end(group, fate, int(length)) for length in lengths]
    (sentence,) = bias.findings(bias.compare(rows))
    assert "raise train.alpha" in sentence


def test_without_bias_it_is_seldom_called_one():
    """The error of the first kind at level 5 %: of 200 runs 10 are expected, and 22 or more are one in
    2,000 (binomial). Held against twice that rate because a bootstrap of 60 groups is an approximation."""
    dice = np.random.default_rng(4)
    called = sum(
        of_tokens(bias.compare(dropped_at_random(dice, 60), resamples=199, seed=run)).p_value < 0.05
        for run in range(200)
    )
    assert called <= 22
    assert called >= 1  # a test that never calls would also never find


def test_without_bias_the_sentence_says_so():
    comparisons = bias.compare(dropped_at_random(np.random.default_rng(5), 120))
    (sentence,) = bias.findings(comparisons)
    assert sentence.startswith("No bias seen: over 720 generated trajectories")


def test_where_everything_is_trained_nothing_can_differ():
    rows = [end(group, Fate.TRAINED, 3 + group % 5) for group in range(40)]
    found = of_tokens(bias.compare(rows))
    assert (found.distance, found.p_value, found.cause) == (pytest.approx(0), 1.0, None)


def test_few_trajectories_are_no_ground_for_a_sentence():
    rows = [end(group, Fate.TRAINED, 5) for group in range(bias.FEWEST - 1)]
    assert bias.compare(rows) == []
    (sentence,) = bias.findings([])
    assert sentence.startswith("Nothing can be said yet")


def test_a_small_difference_is_not_worth_a_word_however_certain():
    dice = np.random.default_rng(6)
    rows = []
    for group in range(20_000):
        long = int(dice.random() < 0.5)
        fate = Fate.STALE if long and dice.random() < 0.05 else Fate.TRAINED
        rows.append(end(group, fate, 100 + long))
    comparisons = bias.compare(rows)
    assert of_tokens(comparisons).p_value <= 0.001
    assert bias.biased(comparisons) == []


def test_many_comparisons_are_corrected_for():
    def comparison(domain, p_value):
        return bias.Comparison(
            domain, "turns", 100, 50, 0, (1, 2, 3), (1, 2, 3), 2.0, 1.0, 0.4, p_value, Fate.STALE
        )

    # By Holm: 0.001 x 4 and 0.003 x 3 and 0.004 x 2 and 0.02 x 1, until the first at 0.01 or more.
    four = [comparison(name, p) for name, p in (("a", 0.001), ("b", 0.003), ("c", 0.004), ("d", 0.02))]
    assert [found.domain for found in bias.biased(four)] == ["a", "b", "c"]
    assert bias.biased([comparison("a", 0.006), comparison("b", 0.9)]) == []
    assert [found.domain for found in bias.biased([comparison("a", 0.006)])] == ["a"]


def test_shares_of_domains():
    rows = [end(0, Fate.TRAINED, 10, domain="b")] * 3 + [end(1, Fate.CANCELLED, 7, domain="a")] * 1
    a, b = bias.domain_shares(rows)
    assert (a.domain, a.generated, a.accepted, a.generated_share, a.accepted_share) == ("a", 1, 0, 0.25, 0.0)
    assert (b.generated_share, b.accepted_share, b.fates) == (0.75, 1.0, {"trained": 3})
    assert (a.fates, a.wasted_tokens) == ({"cancelled": 1}, 7)


def test_curves_are_the_distributions_that_are_compared():
    rows = [end(0, Fate.TRAINED, tokens) for tokens in (1, 2) * 10] + [end(1, Fate.STALE, 3)] * 20
    (curve,) = bias.curves(rows, "sampled_tokens")
    assert curve.lengths == [1, 2, 3]
    assert curve.accepted == pytest.approx([0.5, 1, 1])
    assert curve.generated == pytest.approx([0.25, 0.5, 1])
    assert bias.curves(rows, "turns") == []  # of one turn each


def test_seconds_that_all_differ_are_put_in_classes_without_moving_the_mean():
    dice = np.random.default_rng(7)
    seconds = dice.exponential(10, 5000)
    rows = [end(i % 500, Fate.TRAINED, 1, seconds=value) for i, value in enumerate(seconds)]
    (found,) = [c for c in bias.compare(rows, resamples=9) if c.measure == "seconds"]
    assert found.accepted_mean == pytest.approx(seconds.mean())
