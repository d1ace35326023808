"""Bounded staleness (RollArt §6.2): which policy versions a batch may still hold.

The batch of step n trains the weights of version n. The staleness of a trajectory in it is n minus the oldest
version that sampled one of its tokens, and never exceeds alpha.
"""


def oldest_admissible(step: int, alpha: int) -> int:
    """The oldest version whose tokens the batch of `step` may hold."""
    return max(0, step - alpha)


def staleness(step: int, oldest_version: int) -> int:
    """Staleness of a trajectory trained at `step`.

    Raises ValueError for a version that the step cannot have seen: a stamp lost in a conversion must not pass
    as a fresh sample.
    """
    if not 0 <= oldest_version <= step:
        raise ValueError(f"version stamp {oldest_version} is impossible in the batch of step {step}")
    return step - oldest_version
