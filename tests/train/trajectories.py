"""Trajectories for tests, written out by hand."""

from collections.abc import Sequence

import numpy as np

from tasks.trajectory import (
    NOT_GENERATED,
    Outcome,
    Reward,
    StopReason,
    Trajectory,
    TrajectoryKey,
)


def trajectory(
    tokens: Sequence[int],
    mask: Sequence[int],
    logprobs: float | Sequence[float] = 0.0,
    *,
    group: int = 0,
    member: int = 0,
    outcome: Outcome = Reward(0.0),  # noqa: B008
) -> Trajectory:
    loss_mask = np.array(mask, np.bool_)
    return Trajectory(
        key=TrajectoryKey(group, member),
        domain="test",
        seed=group,
        initiating_version=0,
        tokens=np.array(tokens, np.int32),
        loss_mask=loss_mask,
        logprobs=np.where(loss_mask, logprobs, 0.0).astype(np.float32),
        versions=np.where(loss_mask, 0, NOT_GENERATED).astype(np.int32),
        turns=[],
        stop=StopReason.TERMINATED,
        outcome=outcome,
    )
