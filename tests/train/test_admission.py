from tasks.train.admission import capacity, horizon_slots
from tasks.train.batching import DomainQuota


def slots(**changes: int) -> int:
    defaults = {"version": 0, "alpha": 1, "groups_per_batch": 4, "steps": 100, "redundant_groups": 0}
    return horizon_slots(**{**defaults, **changes})


def test_groups_may_be_begun_for_the_batches_they_can_still_be_trained_in() -> None:
    assert slots(version=0, alpha=0) == 4
    assert slots(version=0, alpha=1) == 8
    assert slots(version=3, alpha=2) == 24


def test_nothing_is_begun_past_the_last_step() -> None:
    assert slots(version=9, alpha=3, steps=10) == 40
    assert slots(version=0, steps=0, redundant_groups=2) == 0


def test_a_last_batch_keeps_later_ones_from_being_begun() -> None:
    assert slots(version=0, alpha=1, last_batch=0) == 4
    assert slots(version=0, alpha=1, last_batch=1) == 8
    assert slots(version=0, alpha=1, last_batch=2) == 8
    assert slots(version=9, alpha=1, steps=10, last_batch=10) == 40


def test_redundant_groups_come_on_top_once() -> None:
    assert slots(redundant_groups=2) == 10


def test_what_is_trained_ready_or_running_takes_places_and_dropped_groups_free_them() -> None:
    quota = DomainQuota({"a": 1.0, "b": 1.0}, 4)
    assert capacity(quota, 8, {}) == {"a": 4, "b": 4}
    assert capacity(quota, 8, {"a": 4, "b": 1}) == {"a": 0, "b": 3}
    assert capacity(quota, 8, {"a": 6, "b": 4}) == {"a": 0, "b": 0}
