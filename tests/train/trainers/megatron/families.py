"""A tiny random model of each family that the Megatron trainer knows, written to directories."""

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 33
"""Odd, so that tensor parallelism has to pad it."""

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def _models() -> dict[str, PreTrainedModel]:
    rope = {"rope_type": "default", "rope_theta": 500.0}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=True, rope_parameters=rope)),
        "untied": LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=False)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=True)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=False)),
        "qwen3_moe": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**_SIZES, head_dim=16, norm_topk_prob=True, tie_word_embeddings=True, **experts)
        ),
        "unnormalised_moe": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**_SIZES, head_dim=16, norm_topk_prob=False, **experts)
        ),
    }


def write_families(directory: Path) -> None:
    """Norms and biases are random too: at their usual 1 and 0 a mistake with them would not show."""
    torch.manual_seed(0)
    for family, model in _models().items():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter, 1.0, 0.3)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, 0.0, 0.3)
        model.save_pretrained(directory / family)
