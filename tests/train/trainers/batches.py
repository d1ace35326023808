"""Batches for trainers' tests."""

import numpy as np

from tasks.trajectory import Reward, Trajectory
from tests.train.trajectories import trajectory


def random_trajectories(
    seed: int = 0, groups: int = 4, members: int = 4, *, vocabulary: int = 32
) -> list[Trajectory]:
    """Multi-turn trajectories of 4 to 20 tokens with random rewards."""
    random = np.random.default_rng(seed)
    made = []
    for group in range(groups):
        for member in range(members):
            length = int(random.integers(4, 21))
            mask = random.random(length) < 0.6
            mask[0], mask[-1] = False, True
            made.append(
                trajectory(
                    random.integers(0, vocabulary, length).tolist(),
                    mask.tolist(),
                    (-3.5 + 0.3 * random.standard_normal(length)).tolist(),
                    group=group,
                    member=member,
                    outcome=Reward(float(random.random())),
                )
            )
    return made
