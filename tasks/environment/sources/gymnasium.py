"""Gymnasium's toy-text environments as text: short observations, actions as words.

An environment joins by an adapter: the words of its actions, and its states in words. Texts are as short as
they can be, so that a policy of a few million parameters learns from them on a laptop.
"""

import re
from collections import deque
from random import Random
from typing import Any, ClassVar, Protocol

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from tasks.environment.sources.base import Environment, StepResult

_IDLE_KEPT = 256


class TextAdapter(Protocol):
    """What turns one Discrete-action environment into text."""

    actions: ClassVar[dict[str, int]]
    """Each word the policy may say, and the action it stands for."""

    def instructions(self, env: gymnasium.Env[Any, Any]) -> str:
        """Said once, before the first observation; what stays the same during the episode belongs here."""

    def describe(self, env: gymnasium.Env[Any, Any], observation: Any) -> str:
        """One observation in words."""


class _FrozenLake:
    actions: ClassVar[dict[str, int]] = {"left": 0, "down": 1, "right": 2, "up": 3}

    def instructions(self, env: gymnasium.Env[Any, Any]) -> str:
        rows = env.unwrapped.desc.astype(str)  # type: ignore[attr-defined]
        lake = "\n".join("".join(row) for row in rows)
        return f"Go from S to G, not into H. Say up, down, left or right.\n{lake}"

    def describe(self, env: gymnasium.Env[Any, Any], observation: Any) -> str:
        row, column = divmod(int(observation), env.unwrapped.ncol)  # type: ignore[attr-defined]
        return f"row {row + 1} column {column + 1}"


class _CliffWalking:
    actions: ClassVar[dict[str, int]] = {"up": 0, "right": 1, "down": 2, "left": 3}

    def instructions(self, env: gymnasium.Env[Any, Any]) -> str:
        return (
            "Go from row 4 column 1 to row 4 column 12. Between them in row 4 is a cliff: who falls starts "
            "again. Say up, down, left or right."
        )

    def describe(self, env: gymnasium.Env[Any, Any], observation: Any) -> str:
        row, column = divmod(int(observation), 12)
        return f"row {row + 1} column {column + 1}"


class _Blackjack:
    actions: ClassVar[dict[str, int]] = {"stick": 0, "hit": 1}

    def instructions(self, env: gymnasium.Env[Any, Any]) -> str:
        return "Get closer to 21 than the dealer, not above it. Say hit or stick."

    def describe(self, env: gymnasium.Env[Any, Any], observation: Any) -> str:
        total, dealer, usable_ace = observation
        return f"you {total}{' soft' if usable_ace else ''} dealer {dealer}"


ADAPTERS: dict[str, type[TextAdapter]] = {
    "FrozenLake-v1": _FrozenLake,
    "CliffWalking-v1": _CliffWalking,
    "Blackjack-v1": _Blackjack,
}

_idle: dict[str, deque[gymnasium.Env[Any, Any]]] = {}


def _take_idle(kind: str) -> gymnasium.Env[Any, Any] | None:
    try:
        return _idle[kind].pop()
    except (KeyError, IndexError):
        return None


class TextEnvironment:
    """One episode of a toy-text environment.

    The action is the last word of the response that names one, in any case and between any other words.
    Without one, nothing moves and the step's reward is `invalid_reward`; the step counts all the same.
    `max_steps` truncates the episode; without it, gymnasium's own limit for the environment holds.
    """

    def __init__(self, id: str, max_steps: int | None, invalid_reward: float, options: dict[str, Any]):
        self._adapter = ADAPTERS[id]()
        self._max_steps = max_steps or gymnasium.spec(id).max_episode_steps
        self._invalid_reward = invalid_reward
        self._kind = f"{id} {sorted(options.items())}"
        # A seeded reset starts afresh; building the transition table costs more than an episode.
        self._env = _take_idle(self._kind) or gymnasium.make(
            id, max_episode_steps=-1, disable_env_checker=True, **options
        )
        self._steps = 0
        self._position = ""

    def reset(self, seed: int) -> str:
        observation, _ = self._env.reset(seed=seed)
        self._steps = 0
        self._position = self._adapter.describe(self._env, observation)
        return f"{self._adapter.instructions(self._env)}\n{self._position}"

    def step(self, action: str) -> StepResult:
        self._steps += 1
        out_of_steps = self._max_steps is not None and self._steps >= self._max_steps
        words = re.findall(r"[a-z]+", action.lower())
        said = [word for word in words if word in self._adapter.actions]
        if not said:
            return StepResult(
                f"invalid, {self._position}", self._invalid_reward, False, out_of_steps, {"valid": False}
            )
        observation, reward, terminated, _, _ = self._env.step(self._adapter.actions[said[-1]])
        self._position = self._adapter.describe(self._env, observation)
        truncated = out_of_steps and not terminated
        return StepResult(self._position, float(reward), bool(terminated), truncated, {"valid": True})

    def sample_action(self, draw: Random) -> str:
        """One of the environment's words, each as likely."""
        return draw.choice(sorted(self._adapter.actions))

    def close(self) -> None:
        _idle.setdefault(self._kind, deque(maxlen=_IDLE_KEPT)).append(self._env)


class _RandomLake:
    """FrozenLake on a map of its own for each seed, drawn by gymnasium's generator."""

    def __init__(self, side: int, max_steps: int | None, invalid_reward: float, options: dict[str, Any]):
        self._side = side
        self._arguments = (max_steps, invalid_reward, options)

    def reset(self, seed: int) -> str:
        max_steps, invalid_reward, options = self._arguments
        lake = generate_random_map(self._side, seed=seed)
        self._lake = TextEnvironment("FrozenLake-v1", max_steps, invalid_reward, {**options, "desc": lake})
        return self._lake.reset(seed)

    def step(self, action: str) -> StepResult:
        return self._lake.step(action)

    def sample_action(self, draw: Random) -> str:
        """One of the four words, each as likely."""
        return self._lake.sample_action(draw)

    def close(self) -> None:
        return None


def make(
    id: str,
    max_steps: int | None = None,
    invalid_reward: float = 0.0,
    random_map: int | None = None,
    **options: Any,
) -> Environment:
    """The environment of a gymnasium `id`; what is not named here is passed to `gymnasium.make`.

    `random_map` (FrozenLake only) is the side of a map drawn anew from each seed. Raises ValueError for an
    `id` without a text adapter.
    """
    if id not in ADAPTERS:
        raise ValueError(f"id {id!r} has no text adapter; those with one: {sorted(ADAPTERS)}")
    if random_map is not None:
        if id != "FrozenLake-v1":
            raise ValueError(f"random_map is for FrozenLake-v1 only, not for {id}")
        return _RandomLake(random_map, max_steps, invalid_reward, options)
    return TextEnvironment(id, max_steps, invalid_reward, options)
