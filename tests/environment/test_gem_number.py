import pytest

from tasks.environment.sources import make

SOURCE = "tasks.environment.sources.gem_number:BareNumberGame"


@pytest.mark.parametrize("says", ["5", "My guess is 5.", "1 is not it, so 5", "\\boxed{5}"])
def test_a_bare_number_is_a_guess(says):
    environment = make(SOURCE, {"id": "game:GuessTheNumber-v0-easy"})
    environment.reset(3)
    result = environment.step(says)
    assert "you guessed 5" in result.observation
    assert result.reward == 0.0
    assert not result.terminated


@pytest.mark.parametrize("says", ["hello", "5.5", "\\boxed{five} 5"])
def test_without_a_whole_number_or_with_another_box_the_game_judges_as_ever(says):
    environment = make(SOURCE, {"id": "game:GuessTheNumber-v0-easy"})
    environment.reset(3)
    result = environment.step(says)
    assert result.reward == -0.1
    assert result.terminated
