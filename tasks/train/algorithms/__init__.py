"""One module an algorithm. `make_algorithm` finds the one that a campaign names."""

from collections.abc import Callable

from tasks.train.algorithms.base import Algorithm
from tasks.train.algorithms.grpo import Grpo
from tasks.train.config import GrpoConfig

_ALGORITHMS: dict[str, Callable[[GrpoConfig], Algorithm]] = {"grpo": Grpo}


def make_algorithm(config: GrpoConfig) -> Algorithm:
    """The algorithm of `train.algorithm`."""
    return _ALGORITHMS[config.kind](config)
