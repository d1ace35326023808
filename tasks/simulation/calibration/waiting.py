"""An environment that waits: for campaigns whose only purpose is to be timed."""

import random
import threading

from tasks.environment.sources.base import StepResult


class WaitingTurns:
    """`turns` turns, each answered after N(`mean_ms`, `sigma_ms`), never below zero.

    Latency and reward (1 or 0, equally often) are drawn from the seed and from what the policy has said.
    """

    def __init__(self, turns: int, mean_ms: float, sigma_ms: float = 0.0) -> None:
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
        return f"Say anything, {seed % 1000}."

    def step(self, action: str) -> StepResult:
        self._said += f"/{action}"
        self._turn += 1
        draw = random.Random(self._said)
        threading.Event().wait(max(0.0, draw.gauss(self._mean_s, self._sigma_s)))
        ended = self._turn >= self._turns
        return StepResult("Go on.", float(ended and draw.random() < 0.5), terminated=ended)

    def close(self) -> None:
        """There is nothing to give back."""
