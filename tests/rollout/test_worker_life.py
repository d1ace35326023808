import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.rollout.worker_life import RestartBudget, WorkerLife, WorkerPhase


def life(restarts: int = 2, window_s: float = 100.0) -> WorkerLife:
    return WorkerLife(RestartBudget(restarts, window_s))


def test_a_worker_joins_is_suspected_answers_and_is_lost() -> None:
    worker = life()
    assert worker.phase is WorkerPhase.STARTING
    assert worker.joined()
    worker.late()
    assert worker.phase is WorkerPhase.SUSPECTED
    worker.answered()
    assert worker.phase is WorkerPhase.SERVING
    assert worker.lost(0.0)
    assert worker.phase is WorkerPhase.LOST


def test_a_loss_is_told_once_and_taken_up_once() -> None:
    worker = life()
    worker.joined()
    assert worker.lost(0.0)
    assert not worker.lost(0.0)
    assert worker.taken()
    assert not worker.taken()
    assert worker.joined()
    assert not worker.joined()


def test_lost_too_often_within_the_window_it_is_set_aside_for_good() -> None:
    worker = life(restarts=2, window_s=100.0)
    for at in (0.0, 50.0):
        worker.lost(at)
        assert worker.taken()
        worker.joined()
    worker.lost(99.0)
    assert worker.phase is WorkerPhase.SET_ASIDE
    assert not worker.taken()
    assert not worker.joined()
    assert not worker.lost(1000.0)


def test_losses_long_ago_do_not_count() -> None:
    worker = life(restarts=1, window_s=100.0)
    for at in (0.0, 100.0, 250.0):
        worker.lost(at)
        assert worker.taken()
        worker.joined()
    worker.lost(349.0)
    assert worker.phase is WorkerPhase.SET_ASIDE


def test_a_start_that_fails_counts_as_a_loss() -> None:
    worker = life(restarts=1)
    worker.joined()
    worker.lost(0.0)
    worker.taken()
    assert worker.lost(1.0)
    assert worker.phase is WorkerPhase.SET_ASIDE


def test_without_restarts_a_lost_worker_is_set_aside_at_once() -> None:
    worker = life(restarts=0)
    worker.joined()
    worker.lost(0.0)
    assert worker.phase is WorkerPhase.SET_ASIDE


EVENTS = st.sampled_from(["joined", "late", "answered", "lost", "taken"])


@given(st.lists(st.tuples(EVENTS, st.floats(0, 30)), max_size=60), st.integers(0, 4), st.floats(1, 100))
def test_whatever_happens_restarts_stay_within_the_budget_and_set_aside_is_the_end(
    events: list[tuple[str, float]], restarts: int, window_s: float
) -> None:
    worker, at = life(restarts, window_s), 0.0
    lost_at: list[float] = []
    for event, later in events:
        at += later
        before = worker.phase
        if event == "lost":
            told = worker.lost(at)
            assert told == (before not in (WorkerPhase.LOST, WorkerPhase.SET_ASIDE))
            if worker.phase is WorkerPhase.LOST and told:
                lost_at.append(at)
        else:
            getattr(worker, event)()
        if before is WorkerPhase.SET_ASIDE:
            assert worker.phase is WorkerPhase.SET_ASIDE
        if worker.phase.serves and not before.serves:
            assert event == "joined"
        assert sum(1 for when in lost_at if when > at - window_s) <= restarts


def test_a_phase_serves_or_not() -> None:
    assert [phase for phase in WorkerPhase if phase.serves] == [WorkerPhase.SERVING, WorkerPhase.SUSPECTED]


@pytest.mark.parametrize("event", ["late", "answered"])
def test_heart_beats_of_a_past_life_change_nothing(event: str) -> None:
    worker = life()
    worker.joined()
    worker.lost(0.0)
    getattr(worker, event)()
    assert worker.phase is WorkerPhase.LOST
