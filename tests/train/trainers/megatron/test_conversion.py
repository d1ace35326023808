"""Shards by hand, and every family there and back. No process group is needed: conversion is only slicing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config

pytest.importorskip("megatron.core")

from tasks.train.trainers.megatron.conversion import Conversion
from tasks.train.trainers.megatron.model import UnsupportedModel, read_model_config
from tasks.train.trainers.megatron.weight_files import ModelDirectory

FAMILIES = ("llama", "untied", "qwen2", "qwen3", "qwen3_moe")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", [1, 2])
def test_shards_of_all_ranks_make_the_directory_again_bit_for_bit(
    family: str, parts: int, families: Path
) -> None:
    directory = families / family
    conversion = Conversion(read_model_config(directory), parts)
    read = ModelDirectory(directory)
    whole: dict[str, Tensor] = {}
    for parameter in conversion.parameters.values():
        if not parameter.copy:
            shards = [conversion.shard(parameter, read, part) for part in range(parts)]
            whole |= dict(conversion.whole(parameter, shards))
    expected = load_file(directory / "model.safetensors")
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], expected[name]) for name in expected)


def test_query_key_and_value_of_a_group_lie_together() -> None:
    """Two groups of two query heads of size 1: a rank's rows are q q k v of its group."""
    config = Qwen3Config(
        vocab_size=3,
        hidden_size=1,
        intermediate_size=2,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=1,
    )
    tensors = {
        "model.layers.0.self_attn.q_proj.weight": torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
        "model.layers.0.self_attn.k_proj.weight": torch.tensor([[10.0], [20.0]]),
        "model.layers.0.self_attn.v_proj.weight": torch.tensor([[100.0], [200.0]]),
        "model.layers.0.mlp.gate_proj.weight": torch.tensor([[1.0], [2.0]]),
        "model.layers.0.mlp.up_proj.weight": torch.tensor([[10.0], [20.0]]),
        "model.layers.0.mlp.down_proj.weight": torch.tensor([[5.0, 6.0]]),
        "model.embed_tokens.weight": torch.tensor([[1.0], [2.0], [3.0]]),
    }

    def read(name: str, rows: slice, columns: slice) -> Tensor:
        return tensors[name][rows, columns]

    two, one = Conversion(config, 2), Conversion(config, 1)
    layer = "decoder.layers.0."
    qkv = two.parameters[f"{layer}self_attention.linear_qkv.weight"]
    assert two.shard(qkv, read, 0).flatten().tolist() == [1, 2, 10, 100]
    assert two.shard(qkv, read, 1).flatten().tolist() == [3, 4, 20, 200]
    assert one.shard(qkv, read, 0).flatten().tolist() == [1, 2, 10, 100, 3, 4, 20, 200]
    gated = two.parameters[f"{layer}mlp.linear_fc1.weight"]
    assert [two.shard(gated, read, part).flatten().tolist() for part in (0, 1)] == [[1, 10], [2, 20]]
    down = two.parameters[f"{layer}mlp.linear_fc2.weight"]
    assert [two.shard(down, read, part).tolist() for part in (0, 1)] == [[[5]], [[6]]]
    embedding = two.parameters["embedding.word_embeddings.weight"]
    assert [two.shard(embedding, read, part).flatten().tolist() for part in (0, 1)] == [[1, 2], [3, 0]]


def test_only_slices_are_read(families: Path) -> None:
    """A rank of two reads half of every split tensor (the vocabulary: 17 of 33 rows)."""
    conversion = Conversion(read_model_config(families / "untied"), 2)
    stored = ModelDirectory(families / "untied")
    sizes: dict[str, int] = {}

    def read(name: str, rows: slice, columns: slice) -> Tensor:
        tensor = stored(name, rows, columns)
        sizes[name] = tensor.numel()
        return tensor

    for parameter in conversion.parameters.values():
        conversion.shard(parameter, read, 0)
    whole = {
        name: tensor.numel() for name, tensor in load_file(families / "untied/model.safetensors").items()
    }
    for name, size in whole.items():
        share = 1 if "norm" in name else 17 / 33 if "embed" in name or "lm_head" in name else 0.5
        assert sizes[name] == round(size * share), name


def test_a_directory_without_a_tensor_names_it(families: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"has no tensor lm_head\.weight: change model\.path"):
        ModelDirectory(families / "llama")("lm_head.weight", slice(None), slice(None))
