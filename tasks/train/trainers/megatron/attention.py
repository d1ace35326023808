"""Causal attention and RMS norms for Megatron layers, on any device and without Transformer Engine."""

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class CausalAttention(MegatronModule):
    """torch's scaled dot-product attention (flash attention on CUDA), with grouped keys and values.

    Padding on the right needs no mask: a causal query never sees it.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any):
        super().__init__(config=config)
        self._scale = softmax_scale

    def forward(self, query_SBHD: Tensor, key_SBGD: Tensor, value_SBGD: Tensor, *_: Any, **__: Any) -> Tensor:
        """[S, B, heads x D]; heads are this rank's."""
        attended_BHSD = F.scaled_dot_product_attention(
            query_SBHD.permute(1, 2, 0, 3),
            key_SBGD.permute(1, 2, 0, 3),
            value_SBGD.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self._scale,
            enable_gqa=query_SBHD.shape[2] != key_SBGD.shape[2],
        )
        return attended_BHSD.permute(2, 0, 1, 3).flatten(2).contiguous()


class RmsNorm(nn.RMSNorm):
    """torch's RMS norm, whose weight tells Megatron to sum its gradient under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__(hidden_size, eps=eps)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
