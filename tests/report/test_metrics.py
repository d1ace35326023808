import pytest

from tasks.report.metrics import (
    context_wasted,
    domains,
    histogram,
    mean_staleness,
    number,
    reward_numbers,
    rewards,
    smooth,
    stage_seconds,
    trajectories_per_second,
    wasted_by_domain,
    wasted_share,
    wasted_tokens,
)

ROW = {
    "step": 3,
    "trajectories": 64,
    "reward/game/mean": 0.5,
    "reward/game/count": 40,
    "reward/math/easy/mean": None,
    "episode/web/turns": 2.0,
    "staleness/histogram": [10, 20, 10],
    "tokens/trained": 600,
    "tokens/wasted/stale": 100,
    "tokens/wasted/cancelled": 300,
    "seconds/update": 0.5,
    "seconds/step": 4.0,
}


def test_reads_what_a_row_says():
    assert domains([ROW, {"reward/code/mean": 1.0}]) == ["game", "math/easy", "web", "code"]
    assert rewards(ROW) == {"game": 0.5}
    assert wasted_tokens(ROW) == {"stale": 100, "cancelled": 300}
    assert wasted_share([ROW]) == pytest.approx(0.4)
    assert wasted_share([ROW, {"tokens/trained": 1000}]) == pytest.approx(0.2)
    assert stage_seconds(ROW) == {"update": 0.5}
    assert trajectories_per_second(ROW) == 16
    assert mean_staleness([10, 20, 10]) == 1.0
    assert histogram(ROW, "staleness/histogram") == [10, 20, 10]
    assert wasted_by_domain({"waste/game/stale": 3, "waste/game/failed": 4, "waste/a/b/stale": 5}) == {
        "game": 7,
        "a/b": 5,
    }
    context = {"context/wasted/stale": 9, "context/trained": 1, "tokens/recomputed": 2}
    assert context_wasted(context) == {"stale": 9, "recomputed": 2}
    assert reward_numbers({**ROW, "reward/utilisation": 0.06}) == {"utilisation": 0.06}
    assert rewards({**ROW, "reward/utilisation": 0.06}) == {"game": 0.5}
    assert domains([{"reward/utilisation": 0.06}]) == []


def test_says_nothing_of_what_a_row_lacks():
    assert number({"train/loss": None}, "train/loss") is None
    assert number({"train/loss": "nan"}, "train/loss") is None
    assert mean_staleness([]) is None
    assert mean_staleness([0, 0]) is None
    assert wasted_share([{}]) is None
    assert trajectories_per_second({"trajectories": 3, "seconds/step": 0.0}) is None
    assert domains([{"step": 1}]) == []


def test_smoothing_starts_at_the_first_value_and_keeps_gaps():
    # Weights 1/2 and 1/4 of the two values, over their sum 3/4.
    assert smooth([4.0, None, 1.0], 0.5) == [4.0, None, pytest.approx((4.0 * 0.25 + 1.0 * 0.5) / 0.75)]


def test_smoothing_leaves_a_constant_as_it_is():
    assert smooth([0.3] * 50, 0.9) == pytest.approx([0.3] * 50)
