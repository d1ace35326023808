"""The archive of a step is read by DuckDB and pandas directly, and holds all of each trajectory."""

import dataclasses
import uuid
from pathlib import Path

import duckdb
import numpy as np
import pytest

from infra.object_store import MissingObject, ObjectStore
from tasks.train.archive import archived_steps, read_archive, write_archive
from tasks.trajectory import InfraError, Reward, Skip, Trajectory
from tests.builders import trajectory_of


def batch() -> list[Trajectory]:
    scored = [
        trajectory_of(group=group, member=member, reward=reward, version=4 - group, domain="game")
        for group, member, reward in ((0, 0, 1.0), (0, 1, 0.0), (1, 0, 0.25))
    ]
    unscored = [
        dataclasses.replace(trajectory_of(group=2, version=4, domain="math"), outcome=outcome)
        for outcome in (Skip("the gold answer cannot be read"), InfraError("the verifier died"))
    ]
    return [*scored, *unscored]


def test_duckdb_reads_a_run_across_its_steps(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    write_archive(store, 11, 4, batch(), [0.5, -0.5, None, None, None])
    key = write_archive(store, 12, 5, batch()[:1])
    assert key == "archive/step-00000012.parquet"
    files = f"read_parquet('{tmp_path}/archive/*.parquet')"
    rows = duckdb.sql(
        f"SELECT step, name, domain, outcome, reward, advantage, staleness, sampled_tokens FROM {files} "
        "WHERE domain = 'game' ORDER BY step, name"
    ).fetchall()
    assert rows == [
        (11, "g00000000-m000-a00", "game", "reward", 1.0, 0.5, 0, 2),
        (11, "g00000000-m001-a00", "game", "reward", 0.0, -0.5, 0, 2),
        (11, "g00000001-m000-a00", "game", "reward", 0.25, None, 1, 2),
        (12, "g00000000-m000-a00", "game", "reward", 1.0, None, 1, 2),
    ]
    counts = duckdb.sql(
        f"SELECT outcome, count(*), avg(reward) FROM {files} GROUP BY 1 ORDER BY 1"
    ).fetchall()
    assert counts == [("infra_error", 1, None), ("reward", 4, 0.5625), ("skip", 1, None)]
    turns = duckdb.sql(
        f"SELECT turn.response_start, tokens[turn.response_start + 1] FROM "
        f"(SELECT tokens, unnest(turns) AS turn FROM {files} WHERE step = 12)"
    ).fetchall()
    assert turns == [(3, 8)]
    sampled = duckdb.sql(
        f"SELECT count(*) FROM (SELECT unnest(loss_mask) AS sampled FROM {files}) WHERE sampled"
    ).fetchall()
    assert sampled == [(12,)]


def test_pandas_reads_a_step(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    store = ObjectStore(str(tmp_path))
    key = write_archive(store, 3, 4, batch())
    frame = pandas.read_parquet(tmp_path / key)
    assert list(frame.loc[frame.domain == "game", "reward"]) == [1.0, 0.0, 0.25]
    assert list(frame.tokens[0]) == [5, 6, 7, 8, 9]


def test_the_trajectories_of_a_step_are_read_back_as_they_were() -> None:
    store = ObjectStore(f"memory://{uuid.uuid4().hex}")
    write_archive(store, 3, 4, batch())
    read = read_archive(store, 3)
    assert len(read) == len(batch())
    for one, other in zip(read, batch(), strict=True):
        for name in ("tokens", "loss_mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)
        for name in ("key", "domain", "seed", "initiating_version", "turns", "stop", "outcome", "info"):
            assert getattr(one, name) == getattr(other, name)
    assert [one.outcome for one in read[:1]] == [Reward(1.0)]


def test_archiving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    write_archive(store, 3, 4, batch())
    write_archive(store, 3, 4, batch()[:2])
    write_archive(store, 20, 4, [])
    assert len(read_archive(store, 3)) == 2
    assert read_archive(store, 20) == []
    assert archived_steps(store) == [3, 20]
    with pytest.raises(MissingObject):
        read_archive(store, 4)


def test_as_many_advantages_as_trajectories() -> None:
    with pytest.raises(ValueError, match="1 advantages for 5 trajectories"):
        write_archive(ObjectStore("memory://unused"), 3, 4, batch(), [1.0])
