"""When files are uploaded again: at once when they changed, and at a bounded cost while they grow."""

from hypothesis import given
from hypothesis import strategies as st

from infra.uploads import Stamp, Uploads


def test_what_changed_is_due_and_what_did_not_is_not() -> None:
    uploads = Uploads(bytes_per_s=100)
    files = {"b": Stamp(10, 1), "a": Stamp(10, 1)}
    assert uploads.due(files, 0.0) == ["a", "b"]
    uploads.done("a", files["a"], 0.0)
    assert uploads.due(files, 0.0) == ["b"]
    assert uploads.due({**files, "a": Stamp(10, 2)}, 1.0) == ["a", "b"]


def test_a_file_waits_for_as_long_as_its_upload_is_worth() -> None:
    uploads = Uploads(bytes_per_s=100)
    uploads.done("log", Stamp(500, 1), 10.0)
    grown = {"log": Stamp(600, 2)}
    assert uploads.due(grown, 14.9) == []
    assert uploads.due(grown, 15.0) == ["log"]
    assert uploads.due(grown, None) == ["log"], "the last upload waits for nothing"


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=200))
def test_a_growing_file_never_costs_more_than_its_rate(growth: list[int]) -> None:
    uploads, size, sent = Uploads(bytes_per_s=1000), 0, 0
    for second, more in enumerate(growth):
        size += more
        stamp = Stamp(size, second)
        if uploads.due({"log": stamp}, float(second)):
            uploads.done("log", stamp, float(second))
            sent += size
    # All but the last upload have been waited for.
    assert sent <= 1000 * len(growth) + size
