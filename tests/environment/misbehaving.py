"""Environments that hang, raise, sleep or crash on demand, for a host process to run."""

import os
import threading
import time
from typing import Any

from tasks.environment.sources.base import StepResult


class Obedient:
    """Does what the action says: hang, spin, raise, exit, crash, sleep SECONDS, end, junk, or a number to be
    rewarded with. A negative seed does the same in reset, as `bad_reset` names it."""

    def __init__(self, bad_reset: str = "raise", prompt: str = "go"):
        self._bad_reset = bad_reset
        self._prompt = prompt
        self._steps = 0
        self._thread = threading.get_ident()

    def reset(self, seed: int) -> str:
        assert threading.get_ident() == self._thread
        if seed < 0:
            self._obey(self._bad_reset)
        return f"{self._prompt} {seed}"

    def step(self, action: str) -> StepResult:
        assert threading.get_ident() == self._thread
        self._steps += 1
        if action == "junk":
            return "not a StepResult"  # type: ignore[return-value]
        reward = self._obey(action)
        return StepResult(
            f"step {self._steps}", reward, action == "end", action == "cut", {"pid": os.getpid()}
        )

    def _obey(self, order: str) -> Any:
        match order.split():
            case ["hang"]:
                threading.Event().wait()
            case ["spin"]:
                while True:
                    pass
            case ["raise"]:
                raise RuntimeError("told to raise")
            case ["exit"]:
                raise SystemExit(1)
            case ["crash"]:
                os._exit(9)
            case ["sleep", seconds]:
                time.sleep(float(seconds))
            case ["nan"]:
                return float("nan")
            case [number] if number.replace(".", "").isdigit():
                return float(number)
        return 0.0

    def close(self) -> None:
        print("closing")  # to standard output, which must not reach the messages
