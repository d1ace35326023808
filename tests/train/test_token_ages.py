import dataclasses

import numpy as np
import pytest

from tasks.train.token_ages import age_metrics
from tasks.trajectory import NOT_GENERATED, StopReason, Turn
from tests.builders import trajectory_of


def two_turns(first, second):
    """A trajectory of two turns whose tokens have these versions, one written token before each."""
    versions = np.array([NOT_GENERATED, *first, NOT_GENERATED, *second], np.int32)
    mask = versions != NOT_GENERATED
    middle = 1 + len(first)
    return dataclasses.replace(
        trajectory_of(),
        tokens=np.arange(len(versions), dtype=np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(versions), np.float32),
        versions=versions,
        turns=[
            Turn(1, middle, StopReason.STOP, "a"),
            Turn(middle + 1, len(versions), StopReason.STOP, "b"),
        ],
    )


def test_ages_of_tokens_and_of_turns_by_hand():
    """At step 7: tokens 2, 2, 0 | 0 and 1, 1 | 1; turns 2, 0 and 1, 1."""
    found = age_metrics(7, [two_turns([5, 5, 7], [7]), two_turns([6, 6], [6])])
    assert found["staleness/tokens"] == [2, 3, 2]
    assert found["staleness/turns"] == [1, 2, 1]
    assert found["staleness/token_mean"] == pytest.approx(7 / 7)
    assert found["staleness/turn_mean"] == pytest.approx(4 / 4)
    assert found["staleness/mixed_share"] == 0.5


def test_nothing_sampled_is_no_age():
    empty = two_turns([], [])
    assert age_metrics(3, [empty]) == {
        "staleness/tokens": [],
        "staleness/turns": [],
        "staleness/token_mean": 0.0,
        "staleness/turn_mean": 0.0,
        "staleness/mixed_share": 0.0,
    }
    assert age_metrics(3, [])["staleness/tokens"] == []


def test_a_stamp_that_the_step_cannot_have_seen_is_an_error():
    with pytest.raises(ValueError, match="stamps 5 to 8 are impossible in the batch of step 7"):
        age_metrics(7, [two_turns([5], [8])])
