import numpy as np
import pytest

from tasks.train.algorithms.grpo import Grpo
from tasks.train.config import GrpoConfig
from tasks.trajectory import NOT_GENERATED, Reward, StopReason, Trajectory, TrajectoryKey, Turn
from tasks.trajectory_arrow import from_arrow, to_arrow


def split_trajectory(reward: float = 1.0, member: int = 0, **changes: object) -> Trajectory:
    """Three turns in two segments: [p p S S o S] and [c c c S S]."""
    versions = np.array([-1, -1, 4, 4, -1, 5, -1, -1, -1, 5, 6], np.int32)
    fields: dict[str, object] = {
        "key": TrajectoryKey(7, member),
        "domain": "d",
        "seed": 1,
        "initiating_version": 4,
        "tokens": np.arange(10, 21, dtype=np.int32),
        "loss_mask": versions != NOT_GENERATED,
        "logprobs": np.where(versions != NOT_GENERATED, -0.25, 0.0).astype(np.float32),
        "versions": versions,
        "turns": [
            Turn(2, 4, StopReason.STOP, "one"),
            Turn(5, 6, StopReason.STOP, "two"),
            Turn(9, 11, StopReason.STOP, "three"),
        ],
        "stop": StopReason.TERMINATED,
        "outcome": Reward(reward),
        "segment_starts": (0, 6),
    }
    return Trajectory(**{**fields, **changes})  # type: ignore[arg-type]


def test_segments_are_apart_and_every_response_is_in_one_of_them():
    first, second = split_trajectory().segments()
    assert first.tokens.tolist() == [10, 11, 12, 13, 14, 15]
    assert second.tokens.tolist() == [16, 17, 18, 19, 20]
    assert [(turn.action, turn.response_start, turn.response_end) for turn in first.turns] == [
        ("one", 2, 4),
        ("two", 5, 6),
    ]
    assert [(turn.action, turn.response_start, turn.response_end) for turn in second.turns] == [
        ("three", 3, 5)
    ]
    assert (first.sampled_tokens, second.sampled_tokens) == (3, 2)
    assert first.key == second.key
    assert first.outcome == second.outcome == Reward(1.0)
    assert second.oldest_version == 5


def test_a_trajectory_that_was_not_split_is_its_own_segment():
    whole = split_trajectory(segment_starts=(0,))
    assert whole.segments() == [whole]


@pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 6, 3), (0, 11), (0, 12)])
def test_segments_that_do_not_divide_the_tokens_are_refused(starts):
    with pytest.raises(ValueError, match="segments of 11 tokens"):
        split_trajectory(segment_starts=starts)


def test_a_stored_trajectory_keeps_its_segments():
    assert from_arrow(to_arrow(split_trajectory())).segment_starts == (0, 6)


def test_statistics_are_of_trajectories_and_each_response_is_trained_once():
    """Rewards 1 and 0: mean 1/2, deviation (of the population) 1/2, so the advantages are 1 and -1, however
    many segments a member has."""
    members = [split_trajectory(1.0), split_trajectory(0.0, member=1, segment_starts=(0,))]
    batch = Grpo(GrpoConfig()).prepare([segment for member in members for segment in member.segments()])
    assert batch.metrics["train/trajectories"] == 2
    assert [len(sequence.tokens) for sequence in batch.sequences] == [6, 5, 11]
    assert [int(sequence.loss_mask.sum()) for sequence in batch.sequences] == [3, 2, 5]
    assert len({sequence.trajectory for sequence in batch.sequences}) == 2
    for sequence, advantage in zip(batch.sequences, [1.0, 1.0, -1.0], strict=True):
        assert sequence.advantages[sequence.loss_mask].tolist() == pytest.approx(
            [advantage] * int(sequence.loss_mask.sum()), rel=1e-6
        )
