"""The two domains of the throughput benchmark, the very same objects for Tutti and for TRL.

Tutti names them `tests.bench.domains:Sums` and `tests.bench.domains:SlowTurns`; `trl_reference.py` imports
them, so that prompts, answers, latencies and rewards cannot differ between the two systems.
"""

import random
import time

from tasks.environment.sources.base import StepResult


class Sums:
    """One turn: the prompt is `a+b=` with two digits drawn from the seed.

    The reward is 1.0 if the action is exactly the decimal sum, otherwise 0.0.
    """

    def __init__(self) -> None:
        self._answer: str | None = None

    def reset(self, seed: int) -> str:
        draw = random.Random(seed)
        left, right = draw.randrange(10), draw.randrange(10)
        self._answer = str(left + right)
        return f"{left}+{right}="

    def step(self, action: str) -> StepResult:
        if self._answer is None:
            raise RuntimeError("step before reset")
        reward = float(action == self._answer)
        return StepResult("", reward, terminated=True, info={"answer": self._answer})

    def close(self) -> None:
        self._answer = None


class SlowTurns:
    """An environment that takes time: `turns` turns, each answered after `latency_ms` milliseconds.

    Every observation is a digit drawn from the seed and a question mark, for example `7?`; a turn scores if
    the action begins with that digit. Each scored turn gives `1 / turns`, so the episode's return is the
    share of turns scored, between 0 and 1. The last turn takes its latency too and ends the episode.
    """

    def __init__(self, turns: int = 4, latency_ms: float = 50.0) -> None:
        if turns < 1:
            raise ValueError(f"turns must be at least 1, not {turns}")
        if latency_ms < 0:
            raise ValueError(f"latency_ms must not be negative, it is {latency_ms}")
        self._turns = turns
        self._latency_s = latency_ms / 1000
        self._digits: list[str] = []  # the digits still to be answered, the present one first

    def reset(self, seed: int) -> str:
        draw = random.Random(seed)
        self._digits = [str(draw.randrange(10)) for _ in range(self._turns)]
        return f"{self._digits[0]}?"

    def step(self, action: str) -> StepResult:
        if not self._digits:
            raise RuntimeError("step before reset or after the last turn")
        time.sleep(self._latency_s)
        digit = self._digits.pop(0)
        reward = float(action.startswith(digit)) / self._turns
        observation = f"{self._digits[0]}?" if self._digits else ""
        return StepResult(observation, reward, terminated=not self._digits)

    def close(self) -> None:
        self._digits = []
