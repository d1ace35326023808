"""A tensor-parallel worker gets its slices, and fetches little else."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from blocks.weight_store import WeightStore, open_weight_store
from infra.object_store import ObjectStore
from tasks.weights.config import PublicationConfig
from tasks.weights.publication import (
    CorruptWeights,
    MismatchedWeights,
    Slice,
    TruncatedWeights,
    load,
    load_shard,
    publish,
    tensor_parallel_plan,
)
from tests.weights.models import assert_equal, llama_like, stepped

HALVES = {  # Megatron-LM: columns of q and up (dimension 0), rows of o and down (dimension 1)
    "model.embed_tokens.weight": (0, 80),
    "model.layers.0.self_attn.q_proj.weight": (0, 32),
    "model.layers.0.self_attn.q_proj.bias": (0, 32),
    "model.layers.0.self_attn.o_proj.weight": (1, 32),
    "model.layers.0.mlp.up_proj.weight": (0, 48),
    "model.layers.0.mlp.down_proj.weight": (1, 48),
}


def expected_half(weights: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    found = dict(weights)
    for name, (dim, half) in HALVES.items():
        for layer in (0, 1):
            name = name.replace("layers.0", f"layers.{layer}")
            found[name] = weights[name].narrow(dim, rank * half, half)
    return found


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_each_worker_gets_its_slices_of_any_layout(weights: WeightStore, shards: int) -> None:
    config = PublicationConfig(shards=shards, bucket_mib=0.02)
    publication = publish(weights, 1, llama_like().items(), config)
    for rank in (0, 1):
        shard = load_shard(weights, 1, tensor_parallel_plan(publication, rank, 2))
        assert_equal(shard, expected_half(llama_like(), rank))
    assert_equal(load(weights, 1), llama_like())
    assert_equal(load_shard(weights, 1, tensor_parallel_plan(publication, 0, 1)), llama_like())


def test_a_plan_of_ones_own_may_cross_the_pieces(weights: WeightStore) -> None:
    publish(weights, 1, llama_like().items(), PublicationConfig(shards=4))
    up, down = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
    found = load_shard(weights, 1, {up: Slice(0, 20, 90), down: Slice(0, 3, 4), "model.norm.weight": None})
    tensors = llama_like()
    assert_equal(
        found,
        {up: tensors[up][20:90], down: tensors[down][3:4], "model.norm.weight": tensors["model.norm.weight"]},
    )


class Counting:
    """The store of a weight store, and what was read of it."""

    def __init__(self, store: Any):
        self._store = store
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> Any:
        found = self._store.get_ranges(ranges)
        self.bytes += sum(len(data) for data in found)
        return found


def test_only_the_workers_own_bytes_are_fetched(weights: WeightStore) -> None:
    publication = publish(weights, 1, llama_like().items(), PublicationConfig(shards=2))
    store = Counting(weights.store)
    shard = load_shard(WeightStore(store), 1, tensor_parallel_plan(publication, 1, 2))  # type: ignore[arg-type]
    assert store.bytes == sum(tensor.nbytes for tensor in shard.values())
    assert store.bytes < 0.6 * publication.content_size


def test_a_shard_follows_deltas(weights: WeightStore) -> None:
    config = PublicationConfig(shards=2, delta=True)
    tensors = llama_like()
    for version in range(3):
        tensors = stepped(tensors, version)
        publication = publish(weights, version, tensors.items(), config)
    assert publication.depth == 2
    shard = load_shard(weights, 2, tensor_parallel_plan(publication, 1, 2))
    assert_equal(shard, expected_half(tensors, 1))


def test_a_store_that_reads_no_ranges_gives_the_same(tmp_path: Path) -> None:
    weights = WeightStore(ObjectStore(str(tmp_path)))
    publication = publish(weights, 1, llama_like().items(), PublicationConfig(shards=2))
    shard = load_shard(weights, 1, tensor_parallel_plan(publication, 0, 2))
    assert_equal(shard, expected_half(llama_like(), 0))


def test_a_damaged_slice_is_refused(tmp_path: Path) -> None:
    weights = open_weight_store(str(tmp_path))
    publication = publish(weights, 1, llama_like().items(), PublicationConfig(shards=2))
    path = tmp_path / "v00000001" / publication.buckets[0].name
    whole = path.read_bytes()
    entry = publication.tensors["model.layers.0.mlp.down_proj.weight"]
    place = entry.pieces[1].full
    assert place is not None
    damaged = bytearray(whole)
    damaged[place.offset] ^= 1
    path.write_bytes(damaged)
    load_shard(weights, 1, tensor_parallel_plan(publication, 0, 2))
    with pytest.raises(CorruptWeights, match="down_proj"):
        load_shard(weights, 1, tensor_parallel_plan(publication, 1, 2))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TruncatedWeights):
        load_shard(weights, 1, tensor_parallel_plan(publication, 1, 2))


def test_a_plan_that_does_not_fit_is_refused_by_name(weights: WeightStore) -> None:
    publication = publish(weights, 1, llama_like().items())
    with pytest.raises(MismatchedWeights, match=r"embed_tokens.*rollout.engine.tensor_parallel"):
        tensor_parallel_plan(publication, 0, 3)
    with pytest.raises(ValueError, match="rank 2"):
        tensor_parallel_plan(publication, 2, 2)
    with pytest.raises(MismatchedWeights, match="no tensor lm_head"):
        load_shard(weights, 1, {"lm_head.weight": None})
    with pytest.raises(MismatchedWeights, match="no slice"):
        load_shard(weights, 1, {"model.norm.weight": Slice(0, 60, 65)})
