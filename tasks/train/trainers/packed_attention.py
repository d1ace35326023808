"""Causal attention over sequences that lie end to end, each by itself.

Transformers masks the packed row as one long sequence, which costs the square of the row. Here each sequence
costs its own square. For models whose attention is plain: softmax of scaled products, grouped heads, an
optional sliding window. Others keep transformers' mask.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

PACKED = "tutti_packed"
PLAIN_ATTENTION = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Let the model attend to sequences one by one where its attention allows it; whether it does."""
    if model.config.model_type not in PLAIN_ATTENTION:
        return False
    AttentionInterface.register(PACKED, _attention)
    AttentionMaskInterface.register(PACKED, _no_mask)
    model.set_attn_implementation(PACKED)
    return True


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_lengths: tuple[int, ...] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, P, D], key and value [1, groups, P, D] -> [1, P, heads, D].

    `packed_lengths` are the lengths of the P tokens' sequences; without them the row is one sequence.
    """
    lengths = (query.shape[2],) if packed_lengths is None else packed_lengths
    outputs = [
        scaled_dot_product_attention(
            one_query,
            one_key,
            one_value,
            attn_mask=_band(one_query.shape[2], sliding_window, query.device),
            is_causal=sliding_window is None or one_query.shape[2] <= sliding_window,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for one_query, one_key, one_value in zip(
            query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True
        )
    ]
    return torch.cat(outputs, 2).transpose(1, 2), None


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[length, length]: True where a token is not after, and less than `window` before; None if all are."""
    if window is None or length <= window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _no_mask(*_: Any, **__: Any) -> None:
    """Sequences are told apart by their lengths."""
