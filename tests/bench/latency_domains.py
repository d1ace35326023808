"""Environments of the benchmarks of rollout: all that they do is take time, and sometimes fail."""

import math
import random
import time

from tasks.environment.sources.base import StepResult


class NoisyTurns:
    """`turns` turns, each answered after a latency of N(`mean_ms`, `sigma_ms`), never below zero.

    The latency is drawn from the seed and what the policy has said so far: the members of a group wait
    differently, and the same trajectory waits equally long in whichever mode it is generated.
    """

    def __init__(self, turns: int, mean_ms: float, sigma_ms: float) -> None:
        if turns < 1:
            raise ValueError(f"turns must be at least 1, not {turns}")
        if mean_ms < 0 or sigma_ms < 0:
            raise ValueError(f"mean_ms ({mean_ms}) and sigma_ms ({sigma_ms}) must not be negative")
        self._turns = turns
        self._mean_s = mean_ms / 1000
        self._sigma_s = sigma_ms / 1000
        self._said = ""
        self._turn = 0

    def reset(self, seed: int) -> str:
        self._said, self._turn = str(seed), 0
        return "?"

    def step(self, action: str) -> StepResult:
        self._said += f"/{action}"
        self._turn += 1
        draw = random.Random(self._said)
        time.sleep(max(0.0, draw.gauss(self._mean_s, self._sigma_s)))
        ended = self._turn >= self._turns
        return StepResult("?", float(ended and draw.random() < 0.5), terminated=ended)

    def close(self) -> None:
        """There is nothing to give back."""


class TroubledTurns:
    """Resets and steps of log-normal length, a rare long tail, and resets that fail, at once or late.

    A share `failures` of the resets fails: half of these after a reset's time, half hang for `hang_ms` until
    the environment's client gives up, as clients of remote environments do. A share `tails` of the steps
    takes `tail_factor` times as long. Every episode draws anew, so a second try of a trajectory may succeed
    where the first did not.
    """

    def __init__(
        self,
        turns: int,
        reset_ms: float,
        step_ms: float,
        sigma: float,
        hang_ms: float,
        failures: float = 0.1,
        tails: float = 0.01,
        tail_factor: float = 10.0,
    ) -> None:
        """`reset_ms` and `step_ms` are medians, `sigma` the standard deviation of the logarithm."""
        if turns < 1:
            raise ValueError(f"turns must be at least 1, not {turns}")
        if not 0 <= failures <= 1 or not 0 <= tails <= 1:
            raise ValueError(f"failures ({failures}) and tails ({tails}) are shares, from 0 to 1")
        self._turns = turns
        self._reset_s = reset_ms / 1000
        self._step_s = step_ms / 1000
        self._hang_s = hang_ms / 1000
        self._sigma = sigma
        self._failures = failures
        self._tails = tails
        self._tail_factor = tail_factor
        self._draw = random.Random()
        self._turn = 0

    def reset(self, seed: int) -> str:
        self._turn = 0
        fate = self._draw.random()
        if fate < self._failures / 2:
            time.sleep(self._latency(self._reset_s))
            raise ConnectionError("the environment did not come up")
        if fate < self._failures:
            time.sleep(self._hang_s)
            raise TimeoutError("the environment did not answer")
        time.sleep(self._latency(self._reset_s))
        return "?"

    def step(self, action: str) -> StepResult:
        self._turn += 1
        tail = self._tail_factor if self._draw.random() < self._tails else 1.0
        time.sleep(tail * self._latency(self._step_s))
        ended = self._turn >= self._turns
        return StepResult("?", float(ended and self._draw.random() < 0.5), terminated=ended)

    def close(self) -> None:
        """There is nothing to give back."""

    def _latency(self, median_s: float) -> float:
        return median_s * math.exp(self._draw.gauss(0.0, self._sigma))
