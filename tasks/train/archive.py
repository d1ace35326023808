"""The archive of a run: what each train step trained on, one Parquet file a step, one row a trajectory.

`archive/step-00000012.parquet` has the columns of a stored trajectory and, beside them, what the step made of
it. DuckDB and pandas read a run directly: `SELECT ... FROM 'archive/*.parquet'`. Once a step is archived, its
single objects in the sample buffer may be dropped.
"""

import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from infra.object_store import ObjectStore
from tasks.train.staleness import staleness
from tasks.trajectory import Trajectory
from tasks.trajectory_arrow import SCHEMA, from_record_batch, to_record_batch

ADDED = [
    pa.field("step", pa.int32(), nullable=False),
    pa.field("trained_version", pa.int32(), nullable=False),  # the policy version that trained on it
    pa.field("oldest_version", pa.int32(), nullable=False),  # that sampled one of its tokens
    pa.field("staleness", pa.int32(), nullable=False),  # trained_version - oldest_version
    pa.field("sampled_tokens", pa.int32(), nullable=False),
    pa.field("advantage", pa.float64()),  # null where the algorithm gave none to the trajectory as a whole
]

_KEY = re.compile(r"archive/step-(\d{8,})\.parquet")


def write_archive(
    store: ObjectStore,
    step: int,
    trained_version: int,
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float | None] | None = None,
) -> str:
    """Archive a trained batch, in place of an earlier archive of that step. Returns its key.

    Raises ValueError for a version stamp that the trained version cannot have seen.
    """
    if advantages is not None and len(advantages) != len(trajectories):
        raise ValueError(f"{len(advantages)} advantages for {len(trajectories)} trajectories")
    for trajectory in trajectories:
        staleness(trained_version, trajectory.newest_version)
    rows = pa.Table.from_batches([to_record_batch(trajectories)], SCHEMA)
    oldest = [trajectory.oldest_version for trajectory in trajectories]
    added = [
        [step] * len(trajectories),
        [trained_version] * len(trajectories),
        oldest,
        [staleness(trained_version, version) for version in oldest],
        [trajectory.sampled_tokens for trajectory in trajectories],
        [None] * len(trajectories) if advantages is None else list(advantages),
    ]
    for field, values in zip(ADDED, added, strict=True):
        rows = rows.append_column(field, pa.array(values, field.type))
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd")
    key = _key(step)
    store.put(key, sink.getvalue(), durable=True)
    return key


def read_archive(store: ObjectStore, step: int) -> list[Trajectory]:
    """The trajectories of a step, as they were trained. Raises `MissingObject` or `NotATrajectory`."""
    table = pq.read_table(pa.BufferReader(store.get(_key(step))))
    return [trajectory for batch in table.to_batches() for trajectory in from_record_batch(batch)]


def archived_steps(store: ObjectStore) -> list[int]:
    """Ascending."""
    return [int(match[1]) for match in map(_KEY.fullmatch, store.list("archive")) if match is not None]


def _key(step: int) -> str:
    return f"archive/step-{step:08d}.parquet"
