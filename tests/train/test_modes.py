import pytest
from pydantic import ValidationError

from tasks.train.config import TrainConfig
from tasks.train.modes import MODES


def test_the_five_modes_of_the_paper_are_there_under_their_own_names() -> None:
    assert {name: mode.name for name, mode in MODES.items()} == {
        name: name for name in ("sync", "sync_plus", "one_off", "areal", "tutti")
    }


@pytest.mark.parametrize(
    ("mode", "alpha"),
    [("sync", 0), ("sync_plus", 0), ("one_off", 1), ("areal", 1), ("areal", 5), ("tutti", 1), ("tutti", 3)],
)
def test_a_mode_takes_the_alpha_it_is_defined_with(mode: str, alpha: int) -> None:
    assert TrainConfig.model_validate({"mode": mode, "alpha": alpha}).alpha == alpha


@pytest.mark.parametrize(
    ("mode", "alpha", "advice"),
    [
        ("sync", 1, "alpha must be 0 in mode sync, not 1: change alpha or mode"),
        ("sync_plus", 2, "alpha must be 0 in mode sync_plus"),
        ("one_off", 2, "alpha must be 1 in mode one_off"),
        ("one_off", 0, "at least 1 in mode one_off, not 0: change alpha, or take mode sync or sync_plus"),
        ("areal", 0, "at least 1 in mode areal"),
        ("tutti", 0, "at least 1 in mode tutti, not 0: change alpha, or take mode sync or sync_plus"),
    ],
)
def test_another_alpha_is_refused_with_the_options_to_change(mode: str, alpha: int, advice: str) -> None:
    with pytest.raises(ValidationError, match=advice):
        TrainConfig.model_validate({"mode": mode, "alpha": alpha})


@pytest.mark.parametrize("redundancy", [{"groups": 1}, {"members": 1}])
def test_redundancy_is_refused_where_every_turn_waits_for_all(redundancy: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="redundancy cannot outrun stragglers in mode sync"):
        TrainConfig.model_validate({"mode": "sync", "alpha": 0, "redundancy": redundancy})
