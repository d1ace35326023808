import pytest

from tasks.environment.redundancy import GroupProgress
from tasks.trajectory import (
    InfraError,
    MemberSpec,
    Outcome,
    Reward,
    Skip,
    StopReason,
    TrajectoryHeader,
    TrajectoryKey,
)
from tests.builders import header_for


def group(size: int = 2, redundant: int = 1, attempts: int = 2) -> GroupProgress:
    progress = GroupProgress(7, "game", size, redundant, attempts)
    progress.launch()
    return progress


def end(
    member: int,
    attempt: int = 0,
    outcome: Outcome | None = None,
    stop: StopReason = StopReason.TERMINATED,
) -> TrajectoryHeader:
    spec = MemberSpec(TrajectoryKey(7, member, attempt), "game", 1, 2, 0, 1.0)
    return header_for(spec, outcome=outcome, stop=stop)


def test_it_is_complete_once_the_wanted_members_are_there() -> None:
    progress = group(size=2, redundant=1)
    progress.ended(end(2))
    assert not progress.is_complete
    progress.ended(end(0))
    assert progress.is_complete
    assert [member.key.member for member in progress.members] == [0, 2]
    assert progress.running == {1: 0}


@pytest.mark.parametrize("stop", [StopReason.ENVIRONMENT_ERROR, StopReason.ENVIRONMENT_TIMEOUT])
def test_a_fault_is_tried_again_while_attempts_last(stop: StopReason) -> None:
    progress = group(size=2, redundant=0, attempts=2)
    assert progress.ended(end(0, outcome=InfraError("boom"), stop=stop)) == 1
    assert progress.ended(end(0, attempt=1, outcome=InfraError("boom"), stop=stop)) is None
    progress.ended(end(1))
    assert progress.is_complete
    assert [member.key.member for member in progress.members] == [1]


def test_a_failed_reward_is_tried_again_and_a_skip_is_not() -> None:
    progress = group(size=3, redundant=0)
    assert progress.ended(end(0, outcome=InfraError("judge down"))) == 1
    assert progress.ended(end(1, outcome=Skip("no gold answer"))) is None
    assert progress.lost == {1}


def test_a_reward_on_a_failed_or_aborted_trajectory_does_not_count() -> None:
    progress = group(size=1, redundant=1, attempts=1)
    progress.ended(end(0, outcome=Reward(1.0), stop=StopReason.STALE))
    progress.ended(end(1, outcome=Reward(1.0), stop=StopReason.ENVIRONMENT_ERROR))
    assert progress.is_complete
    assert progress.members == ()


def test_news_of_another_attempt_or_a_second_time_is_ignored() -> None:
    progress = group(size=2, redundant=0)
    progress.ended(end(0, attempt=1))
    assert progress.done == {}
    progress.ended(end(0))
    progress.ended(end(0, outcome=Reward(-1.0)))
    assert progress.done[0].outcome == Reward(1.0)
