"""GEM's environments (gem-llm) by id, with their own texts.

GEM draws from the process's global generators, so that what one episode draws would depend on the others in
its process. Each episode here has generator states of its own, put in place under a lock while GEM draws.
"""

import random
import threading
from typing import Any

import gem
import gem.envs  # registers the ids
import numpy as np

from tasks.environment.sources.base import StepResult

_drawing = threading.Lock()


class GemEnvironment:
    """One episode of a GEM `id`, for example `game:GuessTheNumber-v0-easy`; `options` go to `gem.make`."""

    def __init__(self, id: str, **options: Any):
        if id not in gem.envs.registration.ENV_REGISTRY:
            raise ValueError(f"GEM has no id {id!r}")
        # Only the games draw while they are played; a tool that waits must not hold the lock.
        self._draws_in_steps = id.startswith("game:")
        with _drawing:
            self._env = gem.make(id, **options)
        self._states: tuple[Any, Any] | None = None

    def reset(self, seed: int) -> str:
        with _drawing:
            observation, info = self._env.reset(seed=seed % 2**32)
            self._states = (random.getstate(), np.random.get_state())
        return _with_affixes(observation, info)

    def step(self, action: str) -> StepResult:
        if self._draws_in_steps and self._states is not None:
            with _drawing:
                random.setstate(self._states[0])
                np.random.set_state(self._states[1])
                result = self._env.step(action)
                self._states = (random.getstate(), np.random.get_state())
        else:
            result = self._env.step(action)
        observation, reward, terminated, truncated, info = result
        return StepResult(
            _with_affixes(observation, info), float(reward), bool(terminated), bool(truncated), _plain(info)
        )

    def sample_action(self, draw: random.Random) -> str | None:
        """GEM's own random action of this environment; None where it has none."""
        seed = draw.getrandbits(32)
        with _drawing:
            random.seed(seed)
            np.random.seed(seed)
            try:
                return str(self._env.sample_random_action())
            except NotImplementedError:
                return None

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            close()


def _with_affixes(observation: str, info: dict[str, Any]) -> str:
    """As GEM's own observation wrapper joins them."""
    text = observation if observation.endswith("\n") or "suffix" not in info else observation + "\n"
    return f"{info.get('prefix', '')}{text}{info.get('suffix', '')}"


def _plain(info: dict[str, Any]) -> dict[str, Any]:
    kept = (str, int, float, bool, type(None))
    return {
        key: value
        for key, value in info.items()
        if isinstance(value, kept) and key not in ("prefix", "suffix")
    }
