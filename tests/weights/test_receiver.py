"""What an engine holds is always some published version, whole, however it got there."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from blocks.weight_store import WeightStore, open_weight_store
from tasks.weights.config import PublicationConfig
from tasks.weights.publication import (
    CorruptWeights,
    MissingWeights,
    Publisher,
    WeightReceiver,
    WeightsError,
    collect,
    load,
    publish,
    read_publication,
    tensor_parallel_plan,
)
from tests.weights.models import assert_equal, llama_like, stepped

DELTA = PublicationConfig(delta=True, snapshot_every=4, bucket_mib=0.02)


def history(versions: int) -> list[dict[str, torch.Tensor]]:
    found = [llama_like()]
    for version in range(1, versions):
        found.append(stepped(found[-1], version))
        found[-1]["model.norm.weight"] = found[0]["model.norm.weight"]  # a tensor that is not trained
    return found


@pytest.fixture
def published(weights: WeightStore) -> list[dict[str, torch.Tensor]]:
    """Versions 0 to 9; 0, 4 and 8 hold snapshots."""
    found = history(10)
    publisher = Publisher(weights, DELTA)
    for version, tensors in enumerate(found):
        publisher.publish(version, tensors.items())
    publisher.close()
    return found


def test_snapshots_come_every_so_often_and_hold_a_delta_too(
    weights: WeightStore, published: list[dict[str, torch.Tensor]]
) -> None:
    publications = [read_publication(weights, version) for version in range(10)]
    assert [one.depth for one in publications] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert [bool(one.buckets) for one in publications] == [one.depth == 0 for one in publications]
    assert [one.base and one.base.version for one in publications] == [None, *range(9)]
    for version, tensors in enumerate(published):
        assert_equal(load(weights, version), tensors)


def test_whole_loads_pull_a_delta_and_are_not_touched_by_the_next(
    weights: WeightStore, published: list[dict[str, torch.Tensor]]
) -> None:
    receiver = WeightReceiver(weights)
    loaded = [receiver.load_whole(version) for version in (4, 5)]
    assert receiver.last is not None
    assert receiver.last.kind == "delta"
    assert_equal(loaded[0], published[4])
    assert_equal(loaded[1], published[5])


def test_who_has_the_version_before_pulls_the_delta(
    weights: WeightStore, published: list[dict[str, torch.Tensor]]
) -> None:
    receiver = WeightReceiver(weights)
    engine: dict[str, torch.Tensor] = {}
    for version, tensors in enumerate(published):
        given = dict(receiver.load(version))
        assert receiver.last is not None
        if version:
            assert receiver.last.kind == "delta"
            assert receiver.last.versions == (version,)
            assert receiver.last.size < 0.5 * read_publication(weights, version).content_size
            assert "model.norm.weight" not in given
        engine |= {name: tensor.clone() for name, tensor in given.items()}
        assert_equal(engine, tensors)
        assert receiver.version == version


@pytest.mark.parametrize(
    ("has", "wants", "kind", "reads"),
    [
        (None, 7, "snapshot", (4, 5, 6, 7)),
        (1, 3, "delta", (2, 3)),
        (2, 7, "snapshot", (4, 5, 6, 7)),
        (6, 2, "snapshot", (0, 1, 2)),
        (7, 8, "delta", (8,)),
        (6, 8, "snapshot", (8,)),
        (5, 5, "held", ()),
    ],
)
def test_anyone_else_reads_the_newest_snapshot_and_what_followed(
    weights: WeightStore,
    published: list[dict[str, torch.Tensor]],
    has: int | None,
    wants: int,
    kind: str,
    reads: tuple[int, ...],
) -> None:
    receiver = WeightReceiver(weights)
    engine: dict[str, torch.Tensor] = {}
    for version in (wants,) if has is None else (has, wants):
        engine |= {name: tensor.clone() for name, tensor in receiver.load(version)}
    assert receiver.last is not None
    assert (receiver.last.kind, receiver.last.versions) == (kind, reads)
    assert_equal(engine, published[wants])
    receiver.forget()
    assert_equal(dict(receiver.load(wants)), published[wants])


def test_tensor_parallel_workers_pull_their_part_of_the_deltas(weights: WeightStore) -> None:
    versions = history(3)
    publisher = Publisher(weights, PublicationConfig(delta=True, shards=2))
    receivers = [
        WeightReceiver(weights, lambda found, rank=rank: tensor_parallel_plan(found, rank, 2))  # type: ignore[misc]
        for rank in range(2)
    ]
    workers: list[dict[str, torch.Tensor]] = [{}, {}]
    for version, tensors in enumerate(versions):
        publication = publisher.publish(version, tensors.items())
        for worker, receiver in zip(workers, receivers, strict=True):
            worker |= {name: tensor.clone() for name, tensor in receiver.load(version)}
            assert receiver.last is not None
            assert receiver.last.size < 0.7 * (publication.delta_size or publication.size)
        for name in ("model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"):
            dim = 1 if "down" in name else 0
            assert torch.equal(torch.cat([worker[name] for worker in workers], dim), tensors[name])
    publisher.close()


def damage_bucket(folder: Path) -> None:
    (path,) = list(folder.glob("*/d00000.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def remove_bucket(folder: Path) -> None:
    (path,) = list(folder.glob("*/d00000.safetensors"))
    path.unlink()


@pytest.mark.parametrize(
    ("harm", "error"), [(damage_bucket, CorruptWeights), (remove_bucket, MissingWeights)]
)
def test_a_delta_that_fails_leaves_what_was_held(
    tmp_path: Path, harm: Callable[[Path], None], error: type[WeightsError]
) -> None:
    weights = open_weight_store(str(tmp_path))
    versions = history(3)
    publisher = Publisher(weights, PublicationConfig(delta=True))
    for version in (0, 1):
        publisher.publish(version, versions[version].items())
    receiver = WeightReceiver(weights)
    engine = {name: tensor.clone() for name, tensor in receiver.load(0)}
    harm(tmp_path / "v00000001")
    with pytest.raises(error):
        receiver.load(1)
    assert receiver.version == 0
    assert_equal(engine, versions[0])
    # The trainer resumes, publishes the version again, and the delta applies to what was held.
    again = publish(weights, 1, versions[1].items(), PublicationConfig(delta=True))
    engine |= {name: tensor.clone() for name, tensor in receiver.load(1)}
    assert receiver.last is not None
    assert (receiver.last.kind, receiver.last.size > 0) == ("delta", True)
    assert_equal(engine, versions[1])
    assert again.depth == 1


def test_a_version_that_is_published_again_replaces_what_was_held(weights: WeightStore) -> None:
    versions, other = history(3), stepped(llama_like(), 99)
    publish(weights, 0, versions[0].items(), DELTA)
    publish(weights, 1, versions[1].items(), DELTA)
    old = publish(weights, 2, versions[2].items(), DELTA)
    receiver = WeightReceiver(weights)
    engine = {name: tensor.clone() for name, tensor in receiver.load(1)}
    publish(weights, 1, other.items(), DELTA)
    engine |= {name: tensor.clone() for name, tensor in receiver.load(1)}
    assert_equal(engine, other)
    # What was based on the replaced one would give wrong bits, and says so instead.
    assert old.depth > 0
    for reader in (lambda: load(weights, 2), lambda: receiver.load(2)):
        with pytest.raises(MissingWeights, match="was replaced: publish it again"):
            reader()


def test_removal_never_takes_the_base_of_a_kept_version(
    weights: WeightStore, published: list[dict[str, torch.Tensor]]
) -> None:
    assert collect(weights, {7, 9}) == [0, 1, 2, 3]
    for version in (7, 9):
        assert_equal(load(weights, version), published[version])
    assert collect(weights, {9}) == [4, 5, 6, 7]
    assert_equal(load(weights, 9), published[9])
    # Version 10 is being published: its base is not for removal.
    assert collect(weights, {10}) == []
    assert weights.versions() == [8, 9]
    following = stepped(published[9], 10)
    assert publish(weights, 10, following.items(), DELTA).depth == 2
    assert_equal(load(weights, 10), following)


def test_a_version_that_was_removed_is_missing_and_not_wrong(
    weights: WeightStore, published: list[dict[str, torch.Tensor]]
) -> None:
    weights.delete(4)
    with pytest.raises(MissingWeights, match="version 4 is not published"):
        load(weights, 6)
    receiver = WeightReceiver(weights)
    with pytest.raises(MissingWeights):
        receiver.load(7)
    assert receiver.version is None
    assert_equal(dict(receiver.load(9)), published[9])


def test_the_trainer_may_step_while_a_push_goes_on(weights: WeightStore) -> None:
    for config in (DELTA, PublicationConfig(bucket_mib=0.02)):
        publisher = Publisher(weights, config)
        tensors = llama_like()
        pushes, expected = [], []
        for version in range(20, 24):
            expected.append({name: tensor.clone() for name, tensor in tensors.items()})
            pushes.append(publisher.push(version, tensors.items()))
            for tensor in tensors.values():
                tensor.add_(1)
        for version, push, weights_then in zip(range(20, 24), pushes, expected, strict=True):
            assert push.result(60).version == version
            assert_equal(load(weights, version), weights_then)
        publisher.close()
        collect(weights, ())


def test_what_changes_everywhere_is_published_in_full(weights: WeightStore) -> None:
    draw = torch.Generator().manual_seed(0)
    noise = [torch.randint(-(2**15), 2**15, (5000,), generator=draw).to(torch.int16) for _ in range(2)]
    publish(weights, 0, [("w", noise[0])], DELTA)
    second = publish(weights, 1, [("w", noise[1])], DELTA)
    assert (second.depth, second.base, second.delta_size) == (0, None, 0)
    assert_equal(load(weights, 1), {"w": noise[1]})


def test_tensors_may_come_go_and_change_shape_between_versions(weights: WeightStore) -> None:
    first = {"kept": torch.arange(4000), "gone": torch.ones(3), "empty": torch.zeros(0, 3)}
    second = {"kept": torch.arange(4000), "new": torch.ones(5).half(), "empty": torch.zeros(0, 2)}
    third = {"kept": torch.arange(4000).reshape(40, 100), "new": torch.ones(5).half() * 2}
    receiver = WeightReceiver(weights)
    for version, tensors in enumerate((first, second, third)):
        publication = publish(weights, version, tensors.items(), PublicationConfig(delta=True))
        assert publication.depth == version
        given = dict(receiver.load(version))
        assert_equal(load(weights, version), tensors)
        assert ("kept" in given) == (version != 1)
        assert_equal({**tensors, **given}, tensors)
