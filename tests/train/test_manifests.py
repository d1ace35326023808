"""What manifests name is consumed, once, whatever happens to the trainer in between."""

import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pydantic import ValidationError

from blocks.sample_buffer import Sample, SampleBuffer
from infra.object_store import ObjectStore
from tasks.train.lease import LeaseLost
from tasks.train.manifests import (
    BatchManifest,
    ConsumedTwice,
    ManifestEntry,
    ManifestError,
    ManifestHistory,
    OutOfOrder,
    commit,
    consumed_names,
    read_manifests,
)
from tasks.trajectory import TrajectoryKey


class Epoch:
    """A fence that opens and closes as the test says: the lease's own tests are in test_lease."""

    def __init__(self, epoch: int, checks: int = 10**9):
        self.epoch = epoch
        self.checks = checks  # that succeed before the lease is lost

    def check(self) -> None:
        self.checks -= 1
        if self.checks < 0:
            raise LeaseLost("taken over")


def entry(name: str, version: int = 0, **changes: Any) -> ManifestEntry:
    fields: dict[str, Any] = {
        "name": name,
        "version": version,
        "oldest_version": version,
        "domain": "game",
        "group": TrajectoryKey.parse(name).group,
        "reward": 1.0,
        "turns": 1,
        "tokens": 10,
        "sampled_tokens": 4,
    }
    return ManifestEntry(**{**fields, **changes})


def names(group: int, members: int = 2, attempt: int = 0) -> list[str]:
    return [str(TrajectoryKey(group, member, attempt)) for member in range(members)]


def manifest(step: int, groups: list[int], epoch: int = 1, **changes: Any) -> BatchManifest:
    return BatchManifest(
        step=step,
        epoch=epoch,
        trajectories=[entry(name) for group in groups for name in names(group)],
        retired_groups=groups,
        **changes,
    )


@pytest.fixture(params=["local", "memory"])
def buffer(request: pytest.FixtureRequest, tmp_path: Path) -> SampleBuffer:
    url = str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    return SampleBuffer(ObjectStore(url))


def test_a_committed_manifest_is_read_back_equal(buffer: SampleBuffer) -> None:
    first = manifest(0, [1, 2], counts={"tokens/wasted": 12, "seconds": 0.1 + 0.2})
    second = manifest(1, [3])
    assert commit(buffer, first, Epoch(1)) == first
    assert commit(buffer, second, Epoch(1)) == second
    assert read_manifests(buffer) == {0: first, 1: second}
    assert consumed_names(read_manifests(buffer).values()) == {*names(1), *names(2), *names(3)}
    assert first.samples == [Sample(name, 0) for name in (*names(1), *names(2))]


def test_the_manifest_that_is_there_stands(buffer: SampleBuffer) -> None:
    history = ManifestHistory()
    standing = commit(buffer, manifest(0, [1], epoch=1), Epoch(1))
    assert commit(buffer, manifest(0, [2], epoch=2), Epoch(2), history) == standing
    assert history.consumed == set(names(1))
    assert history.unconsumed([Sample(name, 0) for name in (*names(1), *names(2))]) == [
        Sample(name, 0) for name in names(2)
    ]
    assert commit(buffer, manifest(1, [2], epoch=2), Epoch(2), history).names == names(2)


@pytest.mark.parametrize("kept", [True, False])
def test_a_trajectory_is_never_consumed_twice(buffer: SampleBuffer, kept: bool) -> None:
    history = ManifestHistory() if kept else None
    commit(buffer, manifest(0, [1, 2]), Epoch(1), history)
    commit(buffer, manifest(1, [3]), Epoch(1), history)
    with pytest.raises(ConsumedTwice, match=r"step 2 names 2 trajectories .* g00000002-m000-a00"):
        commit(buffer, manifest(2, [4, 2]), Epoch(1), history)
    assert buffer.batches() == [0, 1]
    # The same attempt repeated under a newer version is the same trajectory.
    again = BatchManifest(step=2, epoch=1, trajectories=[entry(names(1)[0], version=5)])
    with pytest.raises(ConsumedTwice):
        commit(buffer, again, Epoch(1), history)
    with pytest.raises(ValidationError, match="twice"):
        BatchManifest(step=2, epoch=1, trajectories=[entry(names(9)[0]), entry(names(9)[0], version=1)])


def test_steps_follow_one_another(buffer: SampleBuffer) -> None:
    history = ManifestHistory()
    commit(buffer, manifest(4, [1]), Epoch(1), history)
    for step in (6, 3):
        with pytest.raises(OutOfOrder):
            commit(buffer, manifest(step, [2]), Epoch(1), history)
    assert buffer.batches() == [4]


def test_a_trainer_without_the_lease_commits_nothing(buffer: SampleBuffer) -> None:
    with pytest.raises(LeaseLost):
        commit(buffer, manifest(0, [1]), Epoch(1, checks=0))
    assert buffer.batches() == []
    with pytest.raises(ManifestError, match="not of epoch 2"):
        commit(buffer, manifest(0, [1], epoch=1), Epoch(2))


def test_a_lease_lost_while_committing_stops_the_loser_and_its_manifest_stands(buffer: SampleBuffer) -> None:
    with pytest.raises(LeaseLost):
        commit(buffer, manifest(0, [1], epoch=1), Epoch(1, checks=1))
    assert commit(buffer, manifest(0, [2], epoch=2), Epoch(2)).names == names(1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_cannot_hold_never_enter_a_manifest(value: float) -> None:
    with pytest.raises(ValidationError):
        entry(names(1)[0], reward=value)
    with pytest.raises(ValidationError):
        manifest(0, [1], counts={"loss": value})


def test_a_manifest_that_cannot_be_read_is_an_error(buffer: SampleBuffer) -> None:
    buffer.commit_batch(0, manifest(1, [1]).model_dump_json().encode())
    with pytest.raises(ManifestError, match="of step 0 says it is of step 1"):
        read_manifests(buffer)
    buffer.commit_batch(1, manifest(1, [1]).model_dump_json().encode()[:-9])
    with pytest.raises(ManifestError, match="of step 1 cannot be read"):
        commit(buffer, manifest(1, [2]), Epoch(1), ManifestHistory())


def test_a_name_under_two_versions_is_offered_once_and_retired_groups_not_at_all() -> None:
    history = ManifestHistory([manifest(0, [1], counts={})])
    held = [
        *(Sample(name, 0) for name in names(1, members=3)),  # member 2 was left over: its group is retired
        *(Sample(name, 1) for name in names(2)),
        *(Sample(name, 3) for name in names(2)[:1]),
    ]
    assert history.unconsumed(held) == [Sample(names(2)[0], 3), Sample(names(2)[1], 1)]


class EveryTrajectoryOnce(RuleBasedStateMachine):
    """Rollout that writes and retries, trainers that are killed at any point and overtaken: every trajectory
    is consumed exactly once (OpenRLHF #1322: ids 0..7, batch 2, oversampled ones lost over a restart)."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = SampleBuffer(ObjectStore(f"memory://{uuid.uuid4().hex}"))
        self.epoch = 0
        self.written: set[str] = set()
        self.trained: list[str] = []
        self.trained_steps = 0  # what the checkpoint holds
        self.start_trainer()

    @rule()
    def start_trainer(self) -> None:
        """After a kill: only the store and the checkpoint are left."""
        self.epoch += 1
        manifests = read_manifests(self.buffer)
        self.history = ManifestHistory(manifests.values())
        self.replay = [manifests[step] for step in sorted(manifests) if step >= self.trained_steps]

    @rule(group=st.integers(0, 7), version=st.integers(0, 2))
    def write(self, group: int, version: int) -> None:
        (name,) = names(group, members=1)
        if group not in self.history.retired_groups:
            self.buffer.put(name, version, b"")
            self.written.add(name)

    @rule(fails=st.sampled_from(["before", "after", "never"]))
    def commit(self, fails: str) -> None:
        waiting = self.history.unconsumed(self.buffer.names())
        if len(waiting) < 2 or self.replay:
            return
        batch = BatchManifest(
            step=self.history.next_step or 0,
            epoch=self.epoch,
            trajectories=[entry(sample.name, sample.version) for sample in waiting[:2]],
            retired_groups=[TrajectoryKey.parse(sample.name).group for sample in waiting[:2]],
        )
        checks = {"before": 0, "after": 1, "never": 2}[fails]
        try:
            standing = commit(self.buffer, batch, Epoch(self.epoch, checks), self.history)
        except LeaseLost:
            self.start_trainer()
        else:
            self.replay.append(standing)

    @precondition(lambda self: self.replay)
    @rule(killed=st.booleans())
    def train(self, killed: bool) -> None:
        if killed:
            self.start_trainer()
            return
        batch = self.replay.pop(0)
        assert batch.step == self.trained_steps
        self.trained.extend(batch.names)
        self.trained_steps += 1
        self.buffer.drop(batch.samples)

    @invariant()
    def none_lost_and_none_twice(self) -> None:
        assert len(set(self.trained)) == len(self.trained)
        waiting = [sample.name for sample in self.history.unconsumed(self.buffer.names())]
        committed = [name for batch in self.replay for name in batch.names]
        assert sorted([*self.trained, *committed, *waiting]) == sorted(self.written)


TestEveryTrajectoryOnce = EveryTrajectoryOnce.TestCase
TestEveryTrajectoryOnce.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
