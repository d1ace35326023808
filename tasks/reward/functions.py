"""Reward functions: pure functions of what an episode left, by name or `package.module:function`.

A reward function takes a `RewardInput` and returns a number, or `Skip(reason)` for a sample that cannot be
judged. It may run anywhere and more than once, so it has no effects. Whatever else it does (None, NaN, an
exception, hanging) is a fault of the machinery and never a reward of 0.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tasks.trajectory import InfraError, Outcome, Reward, Skip


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One episode as a reward function sees it. The three tuples have an item a turn."""

    domain: str
    seed: int
    prompt: str
    actions: tuple[str, ...]
    observations: tuple[str, ...]
    environment_rewards: tuple[float, ...]
    stop: str  # a `StopReason`
    info: dict[str, Any]  # of the environment's last step


RewardFunction = Callable[[RewardInput], float | Skip]


class RewardError(ValueError):
    """There is no such reward function; the message names the domain's option `reward`."""


def environment_return(given: RewardInput) -> float:
    """The sum of the environment's own rewards."""
    return math.fsum(given.environment_rewards)


IN_PROCESS: dict[str, RewardFunction] = {"environment_return": environment_return}
"""Functions of this project that can neither hang nor fail: they need no process of their own."""

REGISTERED = {
    "reasoning_gym": "tasks.reward.reasoning_gym:score",
    "math": "tasks.reward.verifiers.math:verify",
    "numeric": "tasks.reward.verifiers.numeric:verify",
}


def resolve(name: str) -> RewardFunction:
    """The reward function of this name, its module imported. Raises `RewardError`."""
    if name in IN_PROCESS:
        return IN_PROCESS[name]
    module_name, separator, attribute = REGISTERED.get(name, name).partition(":")
    if not separator:
        known = sorted([*IN_PROCESS, *REGISTERED])
        raise RewardError(
            f"reward {name!r} is neither one of {known} nor of the form package.module:function"
        )
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise RewardError(f"reward {name!r}: {error}") from error
    if not callable(function):
        raise RewardError(f"reward {name!r} is not a function")
    resolved: RewardFunction = function
    return resolved


def judge(name: str, function: RewardFunction, given: RewardInput) -> Outcome:
    """Call a reward function and say what came of it."""
    try:
        value = function(given)
    except Exception as error:
        return InfraError(f"reward {name} raised {type(error).__name__}: {error}")
    if isinstance(value, Skip):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return InfraError(f"reward {name} returned {value!r}, which is not a number")
    if not math.isfinite(number):
        return InfraError(f"reward {name} returned {number}")
    return Reward(number)
