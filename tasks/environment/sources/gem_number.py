"""GEM's number games for models that do not box their answers: a bare number counts as the guess."""

from tasks.environment.sources.base import StepResult
from tasks.environment.sources.gem import GemEnvironment
from tasks.environment.sources.numbers import last_number


class BareNumberGame(GemEnvironment):
    """As `GemEnvironment`, but where a response boxes nothing, its last whole number is taken as boxed.

    Small instruct models seldom write `\\boxed{}`, whatever they are shown: without this their episodes end
    at the first response, and there is nothing to learn from.
    """

    def step(self, action: str) -> StepResult:
        number = None if "\\boxed{" in action else last_number(action)
        if number is not None and number == number.to_integral_value():
            action = f"{action} \\boxed{{{int(number)}}}"
        return super().step(action)
