import pytest

from tasks.reward.functions import RewardInput, environment_return
from tasks.reward.serverless import ServerlessTraits, serverless, traits_of

GIVEN = RewardInput("d", 1, "p", ("a",), ("o",), (0.5,), "terminated", {})


def test_a_declared_function_stays_what_it_was():
    @serverless
    def plain(given: RewardInput) -> float:
        return 2.0

    @serverless(memory_mb=256, limit_s=1.5, retries=0)
    def limited(given: RewardInput) -> float:
        return 3.0

    assert (plain(GIVEN), limited(GIVEN)) == (2.0, 3.0)
    assert traits_of(plain) == ServerlessTraits()
    assert traits_of(limited) == ServerlessTraits(256, 1.5, 0)
    assert traits_of(environment_return) is None


@pytest.mark.parametrize("limits", [{"memory_mb": 0}, {"limit_s": 0.0}, {"retries": -1}])
def test_limits_that_cannot_be_are_refused_where_they_are_declared(limits):
    with pytest.raises(ValueError, match="@serverless"):
        serverless(**limits)


def test_the_bare_declaration_has_the_defaults_of_its_traits():
    assert traits_of(serverless()(lambda given: 1.0)) == ServerlessTraits()
