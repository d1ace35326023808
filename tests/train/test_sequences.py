import numpy as np
import pytest

from tasks.train.sequences import TrainingSequence, sequence_of
from tests.train.trajectories import trajectory


def test_a_sequence_ends_with_the_last_sampled_token() -> None:
    sequence = sequence_of(trajectory([9, 1, 2, 8, 3, 7, 7], [0, 1, 1, 0, 1, 0, 0], -0.5), 4, 1.5)
    assert sequence.tokens.tolist() == [9, 1, 2, 8, 3]
    assert sequence.loss_mask.tolist() == [False, True, True, False, True]
    assert sequence.advantages.tolist() == [0, 1.5, 1.5, 0, 1.5]
    assert sequence.behaviour_logprobs.tolist() == [0, -0.5, -0.5, 0, -0.5]
    assert sequence.trajectory == 4


def test_arrays_of_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="unequal"):
        TrainingSequence(
            0,
            0,
            np.zeros(3, np.int32),
            np.zeros(3, np.bool_),
            np.zeros(2, np.float32),
            np.zeros(3, np.float32),
        )


def test_a_token_sampled_from_no_context_is_refused() -> None:
    with pytest.raises(ValueError, match="context"):
        sequence_of(trajectory([9, 1], [1, 1], -0.5), 0, 1.0)
