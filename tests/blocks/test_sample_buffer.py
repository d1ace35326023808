"""The sample buffer: each trajectory once, stale ones dropped by prefix, one manifest a step."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blocks.sample_buffer import Sample, SampleBuffer
from infra.object_store import MissingObject, ObjectStore


@pytest.fixture(params=["local", "memory"])
def buffer(request: pytest.FixtureRequest, tmp_path: Path) -> SampleBuffer:
    url = str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    return SampleBuffer(ObjectStore(url))


def test_a_retry_never_doubles_a_trajectory(buffer: SampleBuffer) -> None:
    assert buffer.put("g00000001-m000-a00", 3, b"first")
    assert not buffer.put("g00000001-m000-a00", 3, b"retried")
    assert buffer.get_many([("g00000001-m000-a00", 3)]) == [b"first"]
    assert buffer.names() == [Sample("g00000001-m000-a00", 3)]


def test_trajectories_come_in_the_order_asked(buffer: SampleBuffer) -> None:
    samples = [Sample(f"g{group:08d}-m000-a00", group % 3) for group in range(20)]
    for sample in samples:
        buffer.put(*sample, sample.name.encode())
    asked = samples[::-3]
    assert buffer.get_many(asked) == [sample.name.encode() for sample in asked]
    assert buffer.names() == sorted(samples, key=lambda sample: (sample.version, sample.name))
    with pytest.raises(MissingObject, match="g00000099"):
        buffer.get_many([*asked, ("g00000099-m000-a00", 0)])


def test_stale_versions_are_dropped_whole_and_others_kept(buffer: SampleBuffer) -> None:
    for version in (0, 1, 2, 10):
        for member in range(3):
            buffer.put(f"g00000001-m{member:03d}-a{version:02d}", version, b"")
    buffer.commit_batch(0, b"{}")
    assert buffer.drop_before(2) == [0, 1]
    assert {sample.version for sample in buffer.names()} == {2, 10}
    assert len(buffer.names()) == 6
    assert buffer.batches() == [0]
    assert buffer.put("g00000001-m000-a00", 0, b"again")  # a late writer is not stopped, and harmless


def test_consumed_trajectories_can_be_dropped_one_by_one(buffer: SampleBuffer) -> None:
    for member in range(4):
        buffer.put(f"g00000001-m{member:03d}-a00", 1, b"")
    buffer.drop([("g00000001-m001-a00", 1), ("g00000001-m002-a00", 1), ("g00000009-m000-a00", 1)])
    assert [sample.name for sample in buffer.names()] == ["g00000001-m000-a00", "g00000001-m003-a00"]


def test_one_manifest_stands_for_a_step(buffer: SampleBuffer) -> None:
    with ThreadPoolExecutor(8) as pool:
        committed = list(pool.map(lambda writer: buffer.commit_batch(7, b"%d" % writer), range(8)))
    assert sum(committed) == 1
    assert buffer.read_batches([7]) == [b"%d" % committed.index(True)]
    buffer.commit_batch(8, b"eight")
    buffer.commit_batch(100_000_000, b"far")
    assert buffer.batches() == [7, 8, 100_000_000]


def test_negative_versions_and_steps_are_refused(buffer: SampleBuffer) -> None:
    with pytest.raises(ValueError, match="version"):
        buffer.put("g00000001-m000-a00", -1, b"")
    with pytest.raises(ValueError, match="step"):
        buffer.commit_batch(-1, b"")
