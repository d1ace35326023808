"""A trajectory survives its trip through Arrow unchanged, and is read by others without this project."""

import dataclasses
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.trajectory import (
    NOT_GENERATED,
    InfraError,
    Outcome,
    Reward,
    Skip,
    StopReason,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from tasks.trajectory_arrow import (
    SCHEMA,
    NotATrajectory,
    from_arrow,
    from_arrow_many,
    to_arrow,
    to_record_batch,
)

_FLOATS = st.floats(allow_nan=False)
_INT32 = st.integers(0, 2**31 - 1)
_TEXT = st.text(max_size=20)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | _FLOATS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_OUTCOMES: st.SearchStrategy[Outcome] = st.one_of(
    st.builds(Reward, _FLOATS), st.builds(Skip, _TEXT), st.builds(InfraError, _TEXT)
)
_TURNS = st.builds(
    Turn, _INT32, _INT32, st.sampled_from(StopReason), st.text(max_size=40), _FLOATS, _FLOATS, _FLOATS
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(0, 40))

    def floats() -> Any:
        return draw(st.lists(st.floats(width=32), min_size=length, max_size=length))

    mask = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), np.bool_)
    stamps = draw(st.lists(_INT32, min_size=length, max_size=length))
    return Trajectory(
        key=TrajectoryKey(draw(st.integers(0, 10**10)), draw(st.integers(0, 999)), draw(st.integers(0, 99))),
        domain=draw(_TEXT),
        seed=draw(st.integers(0, 2**63 - 1)),
        initiating_version=draw(_INT32),
        tokens=np.array(draw(st.lists(_INT32, min_size=length, max_size=length)), np.int32),
        loss_mask=mask,
        logprobs=np.array(floats(), np.float32),
        versions=np.where(mask, stamps, NOT_GENERATED).astype(np.int32),
        turns=draw(st.lists(_TURNS, max_size=4)),
        stop=draw(st.sampled_from(StopReason)),
        outcome=draw(_OUTCOMES),
        info=draw(st.dictionaries(st.text(), _JSON, max_size=4)),
    )


def assert_same(one: Trajectory, other: Trajectory) -> None:
    for field in dataclasses.fields(Trajectory):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            assert left.tobytes() == right.tobytes()
        else:
            assert left == right
            assert type(left) is type(right)


def example() -> Trajectory:
    return Trajectory(
        key=TrajectoryKey(12, 3, 1),
        domain="game",
        seed=7,
        initiating_version=4,
        tokens=np.array([5, 6, 7, 8], np.int32),
        loss_mask=np.array([False, True, True, False]),
        logprobs=np.array([0, -0.5, -1.25, 0], np.float32),
        versions=np.array([-1, 4, 5, -1], np.int32),
        turns=[Turn(1, 3, StopReason.STOP, "left", 1.0, 0.25, 0.5)],
        stop=StopReason.TERMINATED,
        outcome=Reward(1.0),
        info={"gold": "1/2"},
    )


@given(trajectories())
def test_what_is_written_is_read_back_equal(trajectory: Trajectory) -> None:
    assert_same(from_arrow(to_arrow(trajectory)), trajectory)


def test_rewards_keep_every_bit() -> None:
    for value in (-0.0, math.inf, 5e-324, 0.1 + 0.2):
        read = from_arrow(to_arrow(dataclasses.replace(example(), outcome=Reward(value))))
        assert isinstance(read.outcome, Reward)
        assert np.float64(read.outcome.value).tobytes() == np.float64(value).tobytes()


def test_the_arrays_read_may_be_written_to_and_are_apart() -> None:
    data = to_arrow(example())
    read = from_arrow(data)
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        getattr(read, name)[:] = 0
    assert_same(from_arrow(data), example())


def test_many_are_read_at_once_as_they_are_one_by_one() -> None:
    several = [
        dataclasses.replace(example(), key=TrajectoryKey(group, 0), outcome=outcome)
        for group, outcome in enumerate([Reward(0.5), Skip("no gold"), InfraError("lost")])
    ]
    read = from_arrow_many([to_arrow(trajectory) for trajectory in several])
    for left, right in zip(read, several, strict=True):
        assert_same(left, right)
    assert from_arrow_many([]) == []


def test_pyarrow_alone_reads_an_object() -> None:
    with pa.ipc.open_stream(to_arrow(example())) as reader:
        (row,) = reader.read_all().to_pylist()
    assert row["name"] == "g00000012-m003-a01"
    assert row["tokens"] == [5, 6, 7, 8]
    assert row["loss_mask"] == [False, True, True, False]
    assert row["logprobs"] == [0, -0.5, -1.25, 0]
    assert row["versions"] == [-1, 4, 5, -1]
    assert (row["outcome"], row["reward"], row["outcome_reason"]) == ("reward", 1.0, None)
    assert row["turns"][0]["action"] == "left"
    assert row["info"] == '{"gold": "1/2"}'


def test_an_object_cut_anywhere_is_refused() -> None:
    data = to_arrow(example())
    whole = 0
    for length in range(0, len(data), 8):
        try:
            read = from_arrow(data[:length])
        except NotATrajectory:
            continue
        # Only the end-of-stream mark may be missing: all of the row was there.
        assert_same(read, example())
        whole += 1
    assert whole <= 1


def test_other_arrow_data_is_refused() -> None:
    def stream(batch: pa.RecordBatch) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return sink.getvalue().to_pybytes()

    batch = to_record_batch([example()])
    missing = batch.drop_columns(["versions"])
    position = SCHEMA.get_field_index("tokens")
    retyped = batch.set_column(position, "tokens", batch.column("tokens").cast(pa.list_(pa.int64())))
    twice = pa.Table.from_batches([batch, batch]).combine_chunks().to_batches()[0]
    for wrong, message in ((missing, "versions"), (retyped, "tokens is list"), (twice, "not 2")):
        with pytest.raises(NotATrajectory, match=message):
            from_arrow(stream(wrong))
    with pytest.raises(NotATrajectory):
        from_arrow(b"not arrow")


def test_info_that_is_no_json_is_an_error_when_it_is_written() -> None:
    with pytest.raises(TypeError):
        to_arrow(dataclasses.replace(example(), info={"array": np.zeros(2)}))
