"""What a trainer gets: token sequences with an advantage per token, whatever algorithm made them."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tasks.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One sequence. The arrays have equal length T and end with the last sampled token.

    The log-probability and the advantage at index t belong to `tokens[t]` given `tokens[:t]`.
    """

    trajectory: int  # sequences of one trajectory share it: its first index in the list that was prepared
    group: int
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    advantages: NDArray[np.float32]  # 0 where not sampled
    behaviour_logprobs: NDArray[np.float32]  # of the tempered distribution; 0 where not sampled

    def __post_init__(self) -> None:
        arrays = (self.tokens, self.loss_mask, self.advantages, self.behaviour_logprobs)
        if len({len(array) for array in arrays}) != 1:
            raise ValueError(f"sequence of group {self.group}: arrays of unequal lengths")
        if self.loss_mask[:1].any():
            raise ValueError(f"sequence of group {self.group}: its first token was sampled from no context")


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """The sequences of one train step, and what was counted on the way (see `tasks.train.trainers.base`)."""

    sequences: list[TrainingSequence]
    metrics: dict[str, float] = field(default_factory=dict)


def sequence_of(trajectory: Trajectory, index: int, advantage: float) -> TrainingSequence:
    """The trajectory with one advantage on all its sampled tokens, cut after the last of them.

    What follows the last sampled token cannot influence the loss of a causal model.
    """
    end = int(np.flatnonzero(trajectory.loss_mask)[-1]) + 1 if trajectory.sampled_tokens else 0
    loss_mask = trajectory.loss_mask[:end]
    return TrainingSequence(
        trajectory=index,
        group=trajectory.key.group,
        tokens=trajectory.tokens[:end],
        loss_mask=loss_mask,
        advantages=np.where(loss_mask, advantage, 0.0).astype(np.float32),
        behaviour_logprobs=np.where(loss_mask, trajectory.logprobs[:end], 0.0).astype(np.float32),
    )
