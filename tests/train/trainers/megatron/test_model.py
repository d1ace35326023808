"""What the Megatron trainer refuses, before anything starts."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

pytest.importorskip("megatron.core")

from tasks.train.config import MegatronTrainerConfig
from tasks.train.trainers.megatron.model import (
    UnsupportedModel,
    check_parallelism,
    padded_vocabulary,
    read_model_config,
)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (GPT2Config(), "model_type gpt2"),
        (LlamaConfig(attention_bias=True), "attention_bias"),
        (LlamaConfig(mlp_bias=True), "mlp_bias"),
        (LlamaConfig(hidden_act="gelu"), "hidden_act gelu"),
        (Qwen2Config(use_sliding_window=True), "use_sliding_window"),
        (Qwen3MoeConfig(decoder_sparse_step=2), "decoder_sparse_step"),
        (LlamaConfig(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), "rope_type"),
        (
            LlamaConfig(
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 2.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            ),
            "llama3 rope parameters",
        ),
    ],
)
def test_a_model_that_it_would_compute_wrongly_is_refused(
    config: PretrainedConfig, what: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"{what}.*model\.path"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "options", "names"),
    [
        ("llama", {"tensor_parallel": 3}, r"train\.trainer\.tensor_parallel \(3\) .* 4 attention heads"),
        ("llama", {"tensor_parallel": 4}, r"train\.trainer\.tensor_parallel \(4\) .* 2 key-value heads"),
        ("llama", {"pipeline_parallel": 3}, r"train\.trainer\.pipeline_parallel \(3\) .* 2 layers"),
        ("llama", {"data_parallel": 2, "expert_parallel": 2}, r"expert_parallel \(2\) .* 0 experts"),
        ("qwen3_moe", {"data_parallel": 3, "expert_parallel": 3}, r"expert_parallel \(3\) .* 4 experts"),
        ("qwen3_moe", {"tensor_parallel": 2}, r"needs train\.trainer\.sequence_parallel: true"),
    ],
)
def test_a_split_that_does_not_divide_the_model_names_the_option(
    family: str, options: dict[str, Any], names: str, families: Path
) -> None:
    model = read_model_config(families / family)
    with pytest.raises(UnsupportedModel, match=names):
        check_parallelism(model, MegatronTrainerConfig.model_validate(options))


def test_the_vocabulary_is_padded_to_a_multiple_of_the_ranks() -> None:
    assert [padded_vocabulary(33, parts) for parts in (1, 2, 3, 4)] == [33, 34, 33, 36]
