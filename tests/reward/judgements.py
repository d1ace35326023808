"""Reward functions of a user, good and bad."""

import os
import signal
import time
from typing import Any

from tasks.reward.functions import RewardInput
from tasks.reward.serverless import serverless
from tasks.trajectory import Skip


@serverless(limit_s=2.0, retries=2)
def obey_remotely(given: RewardInput) -> Any:
    """`obey`, where the campaign names a function service."""
    return obey(given)


def obey(given: RewardInput) -> Any:
    """What the last action says."""
    match given.actions[-1].split():
        case ["hang"]:
            while True:
                time.sleep(1)
        case ["doze", seconds]:
            time.sleep(float(seconds))
            return 1.0
        case ["time"]:
            return float(time.time_ns())
        case ["raise"]:
            raise ValueError("told to raise")
        case ["crash"]:
            os._exit(3)
        case ["none"]:
            return None
        case ["nan"]:
            return float("nan")
        case ["inf"]:
            return float("inf")
        case ["text"]:
            return "high"
        case ["skip"]:
            return Skip("no gold answer")
        case ["true"]:
            return True
        case ["alarm"]:  # as Math-Verify does; it works on a main thread only
            signal.alarm(5)
            signal.alarm(0)
            return 1.0
        case ["input"]:
            kept = given.domain, given.seed, given.prompt, given.stop, given.info["key"], given.observations
            return 1.0 if kept == ("d", 3, "p", "terminated", [1, "x"], ("o", "q")) else 0.0
        case [number]:
            return float(number)
