"""How old what a step trains was: of each sampled token and turn, policy versions since it was sampled. Pure.

The staleness of a trajectory is that of its oldest token (`tasks.train.staleness`); these say how much of it
is so old.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.trajectory import Trajectory


def age_metrics(step: int, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Metrics of a batch, by the names of `tasks.report.metrics`.

    `staleness/tokens` and `staleness/turns` are histograms whose index is the age; a turn is as old as its
    oldest token. `staleness/mixed_share` is the share of trajectories that more than one version sampled.
    Raises ValueError for a stamp that the step cannot have seen.
    """
    token_ages: list[NDArray[np.int32]] = []
    turn_ages: list[int] = []
    mixed = sampled = 0
    for trajectory in trajectories:
        stamps = trajectory.versions[trajectory.loss_mask]
        if not stamps.size:
            continue
        oldest, newest = int(stamps.min()), int(stamps.max())
        if oldest < 0 or newest > step:
            raise ValueError(
                f"trajectory {trajectory.key}: version stamps {oldest} to {newest} are impossible in the "
                f"batch of step {step}"
            )
        sampled += 1
        mixed += oldest != newest
        token_ages.append(step - stamps)
        turn_ages += [
            step - int(trajectory.versions[turn.response_start : turn.response_end].min())
            for turn in trajectory.turns
            if turn.response_end > turn.response_start
        ]
    ages = np.concatenate(token_ages) if token_ages else np.empty(0, np.int32)
    return {
        "staleness/tokens": np.bincount(ages).tolist(),
        "staleness/turns": np.bincount(np.array(turn_ages, np.int64)).tolist(),
        "staleness/token_mean": float(ages.mean()) if ages.size else 0.0,
        "staleness/turn_mean": float(np.mean(turn_ages)) if turn_ages else 0.0,
        "staleness/mixed_share": mixed / sampled if sampled else 0.0,
    }
