"""What every environment is, whatever library it comes from."""

from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol, runtime_checkable


@dataclass(slots=True)
class StepResult:
    observation: str
    reward: float
    terminated: bool
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    """JSON values that the reward function may need, for example the gold answer."""


class Environment(Protocol):
    """One episode's world. It is used from one thread, for one episode, and then closed.

    It may raise or hang: it lives in a killable process, and the trajectory then ends with a typed outcome.
    """

    def reset(self, seed: int) -> str:
        """Begin the episode of `seed`; the same seed gives the same episode. Returns the first prompt."""

    def step(self, action: str) -> StepResult:
        """Take the policy's response as it was decoded, without special tokens."""

    def close(self) -> None: ...


@runtime_checkable
class Interruptible(Protocol):
    """An environment whose step can be ended from another thread."""

    def interrupt(self) -> None:
        """The episode is over: a step under way is to end soon, whatever it returns or raises."""


@runtime_checkable
class SamplesActions(Protocol):
    """An environment that can also say what a valid action looks like, for the warm-up of a small policy."""

    def sample_action(self, draw: Random) -> str | None:
        """A random valid action in the present state, whatever it leads to; None where it knows none."""
