"""Sums whose answers a real verifier judges: the gold answer is in `info`, as `math` wants it."""

import random

from tasks.environment.sources.base import StepResult


class GoldSums:
    """One turn: `a+b=` with numbers below 1000 drawn from the seed; the environment itself gives nothing."""

    def __init__(self) -> None:
        self._gold = ""

    def reset(self, seed: int) -> str:
        draw = random.Random(seed)
        left, right = draw.randrange(1000), draw.randrange(1000)
        self._gold = str(left + right)
        return f"{left}+{right}="

    def step(self, action: str) -> StepResult:
        return StepResult("", 0.0, terminated=True, info={"gold": self._gold})

    def close(self) -> None:
        self._gold = ""
