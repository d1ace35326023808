"""What every environment is, whatever library it comes from."""

from dataclasses import dataclass, field
from typing import Any, Protocol


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
