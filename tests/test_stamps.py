"""A missing version stamp is an error in every form that a trajectory takes.

uni-agent #103: versions were lost in a conversion, and staleness was constant -1.
"""

import dataclasses
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.object_store import ObjectStore
from tasks.train.archive import read_archive, write_archive
from tasks.trajectory import TrajectoryHeader
from tasks.trajectory_arrow import SCHEMA, NotATrajectory, from_record_batch, to_record_batch
from tests.builders import trajectory_of


def with_column(name, values):
    batch = to_record_batch([trajectory_of(version=3)])
    field = SCHEMA.field(name)
    return batch.set_column(batch.schema.get_field_index(name), field, pa.array([values], field.type))


@pytest.mark.parametrize("stamps", [[-1, -1, -1, -1, 3], [-1, -1, -1, -2, 3], [3, -1, -1, 3, 3]])
def test_a_trajectory_has_a_stamp_exactly_where_it_was_sampled(stamps):
    with pytest.raises(ValueError, match="without a version stamp"):
        dataclasses.replace(trajectory_of(version=3), versions=np.array(stamps, np.int32))


def test_a_written_token_has_no_stamp_but_the_one_that_says_so():
    with pytest.raises(ValueError, match="version stamp"):
        dataclasses.replace(trajectory_of(version=3), versions=np.array([-7, -1, -1, 3, 3], np.int32))


@pytest.mark.parametrize(
    ("stamps", "message"),
    [
        ([-1, -1, -1, None, 3], "versions holds nulls"),
        ([-1, -1, -1, -1, 3], "without a version stamp"),
        ([-1, -1, -1, 3], "unequal lengths"),
        (None, "versions holds nulls"),
    ],
)
def test_arrow_without_a_stamp_is_no_trajectory(stamps, message):
    assert from_record_batch(with_column("versions", [-1, -1, -1, 3, 3]))[0].oldest_version == 3
    with pytest.raises(NotATrajectory, match=message):
        from_record_batch(with_column("versions", stamps))


def test_arrow_without_an_initiating_version_is_no_trajectory():
    with pytest.raises(NotATrajectory, match="initiating_version holds nulls"):
        from_record_batch(with_column("initiating_version", None))


def test_a_turn_without_its_place_is_no_turn():
    turn = dict.fromkeys(("response_start", "response_end", "stop", "action"))
    with pytest.raises(NotATrajectory, match="turns holds nulls"):
        from_record_batch(with_column("turns", [{**turn, "environment_reward": 0.0}]))


@pytest.mark.parametrize("trained_version", [3, 4])
def test_an_archive_holds_no_token_from_the_future(trained_version):
    store = ObjectStore(f"memory://{uuid.uuid4().hex}")
    trajectory = trajectory_of(version=4)
    if trained_version == 4:
        write_archive(store, 4, 4, [trajectory])
        assert read_archive(store, 4)[0].newest_version == 4
    else:
        with pytest.raises(ValueError, match="version stamp 4 is impossible"):
            write_archive(store, 3, 3, [trajectory])
        assert store.list("archive") == []


def test_an_archive_whose_stamps_were_lost_is_not_read():
    store = ObjectStore(f"memory://{uuid.uuid4().hex}")
    key = write_archive(store, 4, 4, [trajectory_of(version=4)])
    table = pq.read_table(pa.BufferReader(store.get(key)))
    place = table.schema.get_field_index("versions")
    lost = pa.array([[-1, -1, -1, None, None]], pa.list_(pa.int32()))
    sink = pa.BufferOutputStream()
    pq.write_table(table.set_column(place, SCHEMA.field("versions"), lost), sink)
    store.put(key, sink.getvalue())
    with pytest.raises(NotATrajectory, match="versions holds nulls"):
        read_archive(store, 4)


@pytest.mark.parametrize("field", ["initiating_version", "oldest_version", "newest_version"])
def test_a_header_without_a_stamp_is_refused(field):
    data = trajectory_of(version=3).header().to_json()
    assert TrajectoryHeader.from_json(data).oldest_version == 3
    with pytest.raises(ValueError, match="impossible version stamps"):
        TrajectoryHeader.from_json({**data, field: -1})
    with pytest.raises(TypeError):
        TrajectoryHeader.from_json({name: value for name, value in data.items() if name != field})


def test_a_header_whose_stamps_are_in_the_wrong_order_is_refused():
    data = trajectory_of(version=3).header().to_json()
    with pytest.raises(ValueError, match="sampled by 5 to 3"):
        TrajectoryHeader.from_json({**data, "oldest_version": 5})
