import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from infra.object_store import ObjectStore
from tasks.train.checkpoint import Checkpoint, Checkpoints, CorruptCheckpoint, NoCheckpoint, PartEntry


def _checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        step,
        {"model": {"w": torch.full((2, 3), float(step))}, "optimizer": {"w/exp_avg": torch.arange(3.0)}},
        {"optimizer_steps": {"w": step}},
    )


def _store(path: Path) -> ObjectStore:
    return ObjectStore(str(path))


def test_the_newest_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    checkpoints = Checkpoints(_store(tmp_path), keep=3)
    checkpoints.save(_checkpoint(9))
    checkpoints.save(_checkpoint(10))
    loaded = checkpoints.load()
    assert loaded.step == 10
    assert torch.equal(loaded.tensors["model"]["w"], torch.full((2, 3), 10.0))
    assert torch.equal(loaded.tensors["optimizer"]["w/exp_avg"], torch.arange(3.0))
    assert loaded.state == {"optimizer_steps": {"w": 10}}
    assert checkpoints.load(9).step == 9


def test_a_checkpoint_without_its_marker_does_not_exist(tmp_path: Path) -> None:
    store = _store(tmp_path)
    checkpoints = Checkpoints(store, keep=3)
    checkpoints.save(_checkpoint(1))
    checkpoints.save(_checkpoint(2))
    store.delete("step-00000002/_SUCCESS")
    assert checkpoints.steps() == [1]
    assert checkpoints.load().step == 1
    with pytest.raises(NoCheckpoint, match="2"):
        checkpoints.load(2)


class _Killed(Exception):
    pass


class _DyingStore(ObjectStore):
    """A store whose writer dies at the given write."""

    writes_left = 0

    def put(self, key: str, data: object, *, durable: bool = False) -> None:
        if self.writes_left == 0:
            raise _Killed
        self.writes_left -= 1
        super().put(key, data, durable=durable)  # type: ignore[arg-type]


@pytest.mark.parametrize("writes", [0, 1, 2, 3])
def test_a_writer_killed_at_any_write_leaves_the_older_checkpoint(tmp_path: Path, writes: int) -> None:
    Checkpoints(_store(tmp_path), keep=2).save(_checkpoint(1))
    dying = _DyingStore(str(tmp_path))
    dying.writes_left = writes
    with pytest.raises(_Killed):
        Checkpoints(dying, keep=2).save(_checkpoint(2))
    survivor = Checkpoints(_store(tmp_path), keep=2)
    assert survivor.load().step == 1
    survivor.save(_checkpoint(2))
    assert survivor.load().step == 2


def test_only_the_newest_are_kept_and_leftovers_are_removed(tmp_path: Path) -> None:
    store = _store(tmp_path)
    checkpoints = Checkpoints(store, keep=2)
    store.put("step-00000001/model.safetensors", b"left by a killed writer")
    for step in (2, 3, 4):
        checkpoints.save(_checkpoint(step))
    assert checkpoints.steps() == [3, 4]
    assert store.folders() == ["step-00000003", "step-00000004"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(_store(tmp_path), keep=2)
    checkpoints.save(_checkpoint(1))
    checkpoints.save(Checkpoint(1, {"model": {"w": torch.zeros(1)}}))
    assert checkpoints.steps() == [1]
    assert checkpoints.load().tensors["model"]["w"].tolist() == [0.0]


def test_a_part_that_changed_since_is_refused(tmp_path: Path) -> None:
    store = _store(tmp_path)
    checkpoints = Checkpoints(store, keep=2)
    checkpoints.save(_checkpoint(1))
    data = bytearray(store.get("step-00000001/model.safetensors"))
    data[-1] ^= 1
    store.put("step-00000001/model.safetensors", bytes(data))
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors"):
        checkpoints.load()


def test_the_marker_names_every_part(tmp_path: Path) -> None:
    store = _store(tmp_path)
    Checkpoints(store, keep=1).save(_checkpoint(1))
    manifest = json.loads(store.get("step-00000001/_SUCCESS"))
    assert set(manifest) == {"model.safetensors", "optimizer.safetensors", "state.json"}


def test_an_empty_store_has_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(_store(tmp_path / "nothing"), keep=1)
    assert checkpoints.steps() == []
    with pytest.raises(NoCheckpoint):
        checkpoints.load()


def test_at_least_one_checkpoint_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.checkpoint\.keep"):
        Checkpoints(_store(tmp_path), keep=0)


def _write_parts(checkpoints: Checkpoints, step: int, ranks: int) -> None:
    """As the ranks of a trainer do; entries travel between them as JSON."""
    checkpoints.begin(step)
    entries = [
        asdict(checkpoints.put_part(step, f"model-{rank}", {"w": torch.full((2,), float(rank))}))
        for rank in range(ranks)
    ]
    checkpoints.complete(
        step, [PartEntry(**entry) for entry in json.loads(json.dumps(entries))], {"ranks": ranks}
    )


def test_parts_of_several_writers_are_one_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(_store(tmp_path), keep=2)
    _write_parts(checkpoints, 3, ranks=3)
    assert checkpoints.parts() == ["model-0", "model-1", "model-2"]
    whole = checkpoints.load()
    assert [whole.tensors[f"model-{rank}"]["w"].tolist() for rank in range(3)] == [[0, 0], [1, 1], [2, 2]]
    assert (whole.step, whole.state) == (3, {"ranks": 3})


def test_a_reader_of_some_parts_fetches_no_others(tmp_path: Path) -> None:
    store = _store(tmp_path)
    checkpoints = Checkpoints(store, keep=2)
    _write_parts(checkpoints, 3, ranks=2)
    store.put("step-00000003/model-0.safetensors", b"unreadable")
    assert checkpoints.load(3, ["model-1"]).tensors["model-1"]["w"].tolist() == [1, 1]
    assert checkpoints.load(3, []).tensors == {}
    with pytest.raises(CorruptCheckpoint, match="model-0"):
        checkpoints.load(3)
    with pytest.raises(NoCheckpoint, match="model-2"):
        checkpoints.load(3, ["model-1", "model-2"])


def test_parts_without_their_completion_do_not_exist_and_begin_removes_them(tmp_path: Path) -> None:
    store = _store(tmp_path)
    checkpoints = Checkpoints(store, keep=2)
    _write_parts(checkpoints, 3, ranks=1)
    checkpoints.begin(4)
    checkpoints.put_part(4, "model-7", {"w": torch.zeros(1)})  # and then every rank was killed
    assert checkpoints.steps() == [3]
    assert checkpoints.load().step == 3
    _write_parts(checkpoints, 4, ranks=2)
    assert store.list("step-00000004") == [
        f"step-00000004/{name}"
        for name in ("_SUCCESS", "model-0.safetensors", "model-1.safetensors", "state.json")
    ]


def test_beginning_a_step_again_withdraws_the_checkpoint_that_was_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(_store(tmp_path), keep=2)
    _write_parts(checkpoints, 3, ranks=1)
    checkpoints.begin(3)
    with pytest.raises(NoCheckpoint):
        checkpoints.load()
