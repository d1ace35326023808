"""A tiny random Llama, written to a directory."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(directory: Path, *, vocabulary: int = 32, seed: int = 0, tied: bool = True) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
