"""`@serverless`: the declaration that a pure reward function may run on a function service.

    @serverless(memory_mb=1024, limit_s=5)
    def correct(given: RewardInput) -> float: ...

The decorated function stays what it was: it can be called, tested and run by local workers. Where a campaign
names a function service (`reward.serverless`), the environment workers send its calls there; without one they
go to warm local workers. Heavy imports are not needed to declare.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, overload

from tasks.reward.functions import RewardFunction

_ATTRIBUTE = "__tutti_serverless__"
_Function = TypeVar("_Function", bound=RewardFunction)


@dataclass(frozen=True, slots=True)
class ServerlessTraits:
    """What a function asks of the service, where the campaign does not say otherwise."""

    memory_mb: int = 1024
    """Memory of an activation; it serves every function of the campaign and gets the most that one asks."""
    limit_s: float = 10.0
    """Seconds for one reward; a domain's `reward_limit_s` counts where it is shorter."""
    retries: int = 2
    """New tries after an activation that failed or was lost; a reward that hangs or raises gets none."""

    def __post_init__(self) -> None:
        if self.memory_mb <= 0 or self.limit_s <= 0 or self.retries < 0:
            raise ValueError("@serverless: memory_mb and limit_s must be above 0 and retries at least 0")


@overload
def serverless(function: _Function) -> _Function: ...
@overload
def serverless(
    *, memory_mb: int = ..., limit_s: float = ..., retries: int = ...
) -> Callable[[_Function], _Function]: ...
def serverless(
    function: _Function | None = None,
    *,
    memory_mb: int = 1024,
    limit_s: float = 10.0,
    retries: int = 2,
) -> _Function | Callable[[_Function], _Function]:
    """Declare a reward function of a module's top level serverless. Raises ValueError for bad limits."""
    traits = ServerlessTraits(memory_mb, limit_s, retries)

    def declare(declared: _Function) -> _Function:
        setattr(declared, _ATTRIBUTE, traits)
        return declared

    return declare if function is None else declare(function)


def traits_of(function: RewardFunction) -> ServerlessTraits | None:
    """What the function was declared with; None when it was not."""
    traits: ServerlessTraits | None = getattr(function, _ATTRIBUTE, None)
    return traits
