"""A trajectory as Arrow: one row whose per-token arrays and turns are lists.

The object of a trajectory in the sample buffer is an Arrow IPC stream of one record batch of one row. The
archive of a step is the same rows in Parquet, so DuckDB and pandas read both without this project.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from tasks.trajectory import (
    InfraError,
    Outcome,
    Reward,
    Skip,
    StopReason,
    Trajectory,
    TrajectoryKey,
    Turn,
)

TURN_TYPE = pa.struct(
    [
        ("response_start", pa.int32()),
        ("response_end", pa.int32()),
        ("stop", pa.string()),
        ("action", pa.string()),
        ("environment_reward", pa.float64()),
        ("generate_seconds", pa.float64()),
        ("environment_seconds", pa.float64()),
    ]
)

SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("member", pa.int32(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("initiating_version", pa.int32(), nullable=False),
        pa.field("stop", pa.string(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),  # reward, skip or infra_error
        pa.field("reward", pa.float64()),  # null unless the outcome is a reward
        pa.field("outcome_reason", pa.string()),  # null if the outcome is a reward
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("versions", pa.list_(pa.int32()), nullable=False),
        pa.field("turns", pa.list_(TURN_TYPE), nullable=False),
        pa.field("segment_starts", pa.list_(pa.int32()), nullable=False),
        pa.field("info", pa.string(), nullable=False),  # JSON
    ]
)
"""Columns of a stored trajectory. The four arrays of a row have equal length."""

_STREAM_START = SCHEMA.serialize().to_pybytes()
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"  # the end-of-stream marker of the Arrow IPC format


class NotATrajectory(ValueError):
    """These bytes are no trajectory of this schema: cut short, or written by something else."""


def to_arrow(trajectory: Trajectory) -> bytes:
    """The trajectory as an Arrow IPC stream; `from_arrow` gives back an equal one.

    Raises TypeError or ValueError when `info` is not JSON.
    """
    return b"".join((_STREAM_START, to_record_batch([trajectory]).serialize(), _STREAM_END))


def from_arrow(data: bytes) -> Trajectory:
    """Raises `NotATrajectory`."""
    return from_arrow_many([data])[0]


def from_arrow_many(objects: Sequence[bytes]) -> list[Trajectory]:
    """The trajectories of these streams, in their order: far quicker than one by one.

    Raises `NotATrajectory`.
    """
    batches = [_read_stream(data) for data in objects]
    if batches and all(batch.schema.equals(SCHEMA) for batch in batches):
        return from_record_batch(pa.concat_batches(batches))
    return [trajectory for batch in batches for trajectory in from_record_batch(batch)]


def _read_stream(data: bytes) -> pa.RecordBatch:
    try:
        with pa.ipc.open_stream(data) as reader:
            batch = reader.read_next_batch()
        batch.validate(full=True)
    except (pa.ArrowInvalid, OSError, StopIteration) as error:
        raise NotATrajectory(f"no Arrow stream of a trajectory: {error}") from None
    if batch.num_rows != 1:
        raise NotATrajectory(f"a trajectory is one row, not {batch.num_rows}")
    return batch


def to_record_batch(trajectories: Sequence[Trajectory]) -> pa.RecordBatch:
    """Rows of `SCHEMA`, made in one call: an array a column costs three times as much for one trajectory."""
    rows = pa.array([_row(trajectory) for trajectory in trajectories], pa.struct(list(SCHEMA)))
    return pa.RecordBatch.from_struct_array(rows)


def _row(trajectory: Trajectory) -> tuple[Any, ...]:
    """The values of `SCHEMA`, in its order."""
    key = trajectory.key
    return (
        str(key),
        key.group,
        key.member,
        key.attempt,
        trajectory.domain,
        trajectory.seed,
        trajectory.initiating_version,
        trajectory.stop.value,
        *_outcome_columns(trajectory.outcome),
        trajectory.tokens,
        trajectory.loss_mask,
        trajectory.logprobs,
        trajectory.versions,
        [
            (
                turn.response_start,
                turn.response_end,
                turn.stop.value,
                turn.action,
                turn.environment_reward,
                turn.generate_seconds,
                turn.environment_seconds,
            )
            for turn in trajectory.turns
        ],
        trajectory.segment_starts,
        json.dumps(trajectory.info),
    )


def from_record_batch(batch: pa.RecordBatch) -> list[Trajectory]:
    """The trajectories of the rows; further columns are ignored. Raises `NotATrajectory`."""
    try:
        columns = {field.name: batch.column(field.name) for field in SCHEMA}
    except KeyError as error:
        raise NotATrajectory(f"the column {error} is missing") from None
    for field in SCHEMA:
        if columns[field.name].type != field.type:
            raise NotATrajectory(f"column {field.name} is {columns[field.name].type}, not {field.type}")
        if not field.nullable and _nulls(columns[field.name]):
            raise NotATrajectory(f"column {field.name} holds nulls")
    header = {name: columns[name].to_pylist() for name in _HEADER}
    arrays = {name: _split(columns[name]) for name in ("tokens", "loss_mask", "logprobs", "versions")}
    turns = _split_turns(columns["turns"])
    try:
        return [
            Trajectory(
                key=TrajectoryKey(header["group_id"][row], header["member"][row], header["attempt"][row]),
                domain=header["domain"][row],
                seed=header["seed"][row],
                initiating_version=header["initiating_version"][row],
                tokens=arrays["tokens"][row],
                loss_mask=arrays["loss_mask"][row],
                logprobs=arrays["logprobs"][row],
                versions=arrays["versions"][row],
                turns=turns[row],
                stop=StopReason(header["stop"][row]),
                outcome=_outcome(
                    header["outcome"][row], header["reward"][row], header["outcome_reason"][row]
                ),
                info=json.loads(header["info"][row]),
                segment_starts=tuple(header["segment_starts"][row]),
            )
            for row in range(batch.num_rows)
        ]
    except ValueError as error:
        raise NotATrajectory(str(error)) from None


_HEADER = (
    "group_id",
    "member",
    "attempt",
    "domain",
    "seed",
    "initiating_version",
    "stop",
    "outcome",
    "reward",
    "outcome_reason",
    "segment_starts",
    "info",
)
_TURN_FIELDS = tuple(field.name for field in dataclasses.fields(Turn))


def _nulls(column: pa.Array) -> int:
    """Missing values of a column, of its lists' items and of these items' fields."""
    count: int = column.null_count
    if pa.types.is_list(column.type):
        count += _nulls(column.flatten())
    elif pa.types.is_struct(column.type):
        count += sum(map(_nulls, column.flatten()))
    return count


def _split(column: pa.ListArray) -> list[NDArray[Any]]:
    """The lists of a column as arrays of their own, which may be written to."""
    values = column.flatten().to_numpy(zero_copy_only=False)
    return [values[start:end].copy() for start, end in _spans(column)]


def _split_turns(column: pa.ListArray) -> list[list[Turn]]:
    values = column.flatten()
    fields = {field.name: values.field(index).to_pylist() for index, field in enumerate(TURN_TYPE)}
    fields["stop"] = [StopReason(stop) for stop in fields["stop"]]
    turns = [Turn(*row) for row in zip(*(fields[name] for name in _TURN_FIELDS), strict=True)]
    return [turns[start:end] for start, end in _spans(column)]


def _spans(column: pa.ListArray) -> Iterable[tuple[int, int]]:
    """Start and end of each list in the flattened column, which begins at the first of them."""
    offsets = column.offsets.to_pylist()
    return itertools.pairwise(offset - offsets[0] for offset in offsets)


def _outcome_columns(outcome: Outcome) -> tuple[str, float | None, str | None]:
    match outcome:
        case Reward(value):
            return "reward", value, None
        case Skip(reason):
            return "skip", None, reason
        case InfraError(reason):
            return "infra_error", None, reason


def _outcome(kind: str, reward: float | None, reason: str | None) -> Outcome:
    if kind == "reward" and reward is not None:
        return Reward(reward)
    if kind == "skip" and reason is not None:
        return Skip(reason)
    if kind == "infra_error" and reason is not None:
        return InfraError(reason)
    raise NotATrajectory(f"outcome {kind!r} with reward {reward} and reason {reason!r}")
