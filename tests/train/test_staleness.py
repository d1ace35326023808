import pytest

from tasks.train.staleness import oldest_admissible, staleness


def test_the_bound_moves_with_the_step_and_never_below_version_0() -> None:
    assert [oldest_admissible(step, alpha=2) for step in range(5)] == [0, 0, 0, 1, 2]
    assert oldest_admissible(7, alpha=0) == 7


def test_staleness_counts_versions_between_sampling_and_training() -> None:
    assert staleness(5, oldest_version=3) == 2


@pytest.mark.parametrize("stamp", [-1, 6])
def test_a_lost_or_impossible_stamp_is_an_error(stamp: int) -> None:
    with pytest.raises(ValueError, match="impossible"):
        staleness(5, oldest_version=stamp)
