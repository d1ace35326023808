"""Group-relative advantages: how much better a trajectory did than the others of its group.

Pure numpy in float64. One reward per trajectory: a trajectory that is trained as several sequences enters
its group once.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class NonFiniteReward(ValueError):
    """A NaN or infinite reward. A reward function must answer with a number, `Skip` or `InfraError`."""


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a group teaches anything: at least two rewards that differ.

    The raw rewards are compared, so that rounding in a mean never makes a tie look like a difference.
    Raises `NonFiniteReward`.
    """
    values = _finite(rewards)
    return bool(values.size > 1 and (values != values[0]).any())


def group_advantages(
    rewards: Sequence[float], *, normalise_by_std: bool = True, std_floor: float = 1e-2, ddof: int = 0
) -> NDArray[np.float64]:
    """Advantages of one group's trajectories, in the order of `rewards`.

    A = r - mean(r), divided by max(std(r), std_floor) when `normalise_by_std` (GRPO, arXiv:2402.03300);
    without the division it is Dr.GRPO (arXiv:2503.20783). The variance is that of the centred rewards, with
    divisor n - `ddof`. A group without signal (one member, or all rewards equal) has advantages of exactly 0.
    Raises `NonFiniteReward`, and ValueError when `ddof` leaves no degree of freedom.
    """
    values = _finite(rewards)
    if not has_signal(rewards):
        return np.zeros(values.size)
    if not 0 <= ddof < values.size:
        raise ValueError(f"ddof must be at least 0 and below the {values.size} rewards, not {ddof}")
    centred = values - values.mean()
    if not normalise_by_std:
        return centred
    std = np.sqrt(np.square(centred).sum() / (values.size - ddof))
    return centred / max(std, std_floor)


def _finite(rewards: Sequence[float]) -> NDArray[np.float64]:
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise NonFiniteReward(
            f"rewards {values.tolist()} are not all finite: the domain's `reward` function must return a "
            "finite number, or say why it cannot judge"
        )
    return values
