"""A domain with stragglers. Light to import."""

import time

from tasks.environment.sources.base import StepResult


class Straggler:
    """One step, which for every third seed takes ten minutes."""

    def reset(self, seed: int) -> str:
        self._seconds = 600 if seed % 3 == 2 else 0
        return "1+1="

    def step(self, action: str) -> StepResult:
        time.sleep(self._seconds)
        return StepResult("", float(len(action) % 2), True)

    def close(self) -> None: ...
