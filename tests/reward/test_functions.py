import math

import pytest

from tasks.reward.functions import RewardError, RewardInput, environment_return, judge, resolve
from tasks.trajectory import InfraError, Reward, Skip


def given(rewards: tuple[float, ...] = (), **info: object) -> RewardInput:
    return RewardInput("d", 1, "p", ("a",) * len(rewards), ("o",) * len(rewards), rewards, "terminated", info)


def test_the_environment_return_is_the_sum_of_its_rewards():
    assert environment_return(given((0.1,) * 10)) == 1.0  # a plain sum is 0.9999999999999999
    assert environment_return(given()) == 0.0


@pytest.mark.parametrize("value", [0.5, 1, True, -2.0])
def test_a_number_is_a_reward(value):
    assert judge("f", lambda _: value, given()) == Reward(float(value))


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, "high", [1.0]])
def test_anything_else_is_a_fault_and_never_zero(value):
    outcome = judge("f", lambda _: value, given())
    assert isinstance(outcome, InfraError)
    assert "reward f returned" in outcome.reason


def test_an_environments_nan_is_a_fault():
    assert isinstance(judge("environment_return", environment_return, given((1.0, math.nan))), InfraError)


def test_skip_is_kept_and_an_exception_is_a_fault_with_its_text():
    assert judge("f", lambda _: Skip("no gold"), given()) == Skip("no gold")

    def broken(_: RewardInput) -> float:
        raise KeyError("gold")

    assert judge("f", broken, given()) == InfraError("reward f raised KeyError: 'gold'")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent", "environment_return"),
        ("absent.module:f", "absent"),
        ("tests.reward.judgements:absent", "absent"),
        ("tests.reward.judgements:__doc__", "not a function"),
    ],
)
def test_a_function_that_is_not_there_is_named(name, said):
    with pytest.raises(RewardError, match=said):
        resolve(name)
