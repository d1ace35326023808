"""A lean decoder of Hugging Face Llama, Qwen2 and Qwen3 dense weights over a slot-based KV cache.

The arithmetic is that of the models in `transformers`; what differs is layout. q, k and v are one matrix
product, so are gate and up. Rows of q and k are permuted so that the two halves RoPE rotates against each
other (i and i + head_dim/2) lie side by side: the rotation is then one multiplication by complex numbers, and
the scores, being dot products of equally permuted vectors, do not change.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tasks.rollout.engines.attention import KvCache, Rows, arrange, attend
from tasks.rollout.engines.kv_blocks import KvShape

_ONEDNN_ROWS = 4  # below, the plain product is faster than the call of a packed one
_PACKED_LINEAR = (
    torch.ops.mkldnn._linear_pointwise.default
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    else None
)


class UnsupportedModel(ValueError):
    """This decoder does not compute what the model's configuration asks for."""


class WeightsMismatch(ValueError):
    """Weights that are not those of the model, whole. The message names the tensors."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What of a Hugging Face configuration determines the computation."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool

    @classmethod
    def from_config(cls, config: Any) -> "DecoderShape":
        """Raises `UnsupportedModel`, naming the option of the model's config.json that is the obstacle."""
        kind = config.model_type
        if kind not in ("llama", "qwen2", "qwen3"):
            raise UnsupportedModel(f"model_type {kind!r} is not one of llama, qwen2, qwen3")
        if config.hidden_act not in ("silu", "swish"):
            raise UnsupportedModel(f"hidden_act {config.hidden_act!r} is not silu")
        if getattr(config, "use_sliding_window", False):
            raise UnsupportedModel("use_sliding_window is set; only full attention is computed")
        rope = config.rope_parameters["rope_type"]
        if "dynamic" in rope or rope == "longrope":
            raise UnsupportedModel(f"rope_type {rope!r} changes with the context's length")
        bias = bool(getattr(config, "attention_bias", False))
        return cls(
            vocabulary=config.vocab_size,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            norm_epsilon=config.rms_norm_eps,
            qkv_bias=bias or kind == "qwen2",
            output_bias=bias and kind != "qwen2",
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=kind == "qwen3",
            tied=bool(config.tie_word_embeddings),
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the weights, as `transformers` saves them."""
        query, cached = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        shapes["model.norm.weight"] = (self.hidden,)
        linears = {
            "self_attn.q_proj": (query, self.hidden, self.qkv_bias),
            "self_attn.k_proj": (cached, self.hidden, self.qkv_bias),
            "self_attn.v_proj": (cached, self.hidden, self.qkv_bias),
            "self_attn.o_proj": (self.hidden, query, self.output_bias),
            "mlp.gate_proj": (self.intermediate, self.hidden, self.mlp_bias),
            "mlp.up_proj": (self.intermediate, self.hidden, self.mlp_bias),
            "mlp.down_proj": (self.hidden, self.intermediate, self.mlp_bias),
        }
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for name, (rows, columns, bias) in linears.items():
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{prefix}{name}.weight"] = (self.hidden,)
            if self.qk_norm:
                for name in ("self_attn.q_norm", "self_attn.k_norm"):
                    shapes[f"{prefix}{name}.weight"] = (self.head_dim,)
        return shapes


class Linear:
    """y = x W^T + b. Wide batches go through oneDNN on a packed copy: twice MKL's speed on AMD processors."""

    __slots__ = ("bias", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight = weight
        self.bias = bias
        self.packed: Tensor | None = None
        if _PACKED_LINEAR is not None and weight.dtype == torch.float32:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        if _PACKED_LINEAR is not None and self.packed is not None and x.shape[0] >= _ONEDNN_ROWS:
            product: Tensor = _PACKED_LINEAR(x, self.packed, self.bias, "none", [], "")
            return product
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: Tensor  # [hidden]
    qkv: Linear  # q and k rows permuted within each head
    q_norm: Tensor | None  # [head_dim], permuted
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """One policy version's weights, checked and laid out for this decoder."""

    embedding: Tensor  # [vocabulary, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    head: Linear


class Decoder:
    """Computes next-token logits of ragged batches of rows. Not safe for concurrent use."""

    def __init__(
        self,
        config: Any,
        weights: Iterable[tuple[str, Tensor]],
        *,
        slots: int,
        max_context: int,
        dtype: torch.dtype = torch.float32,
    ):
        """`config` is a Hugging Face configuration. Raises `UnsupportedModel` or `WeightsMismatch`."""
        self.shape = shape = DecoderShape.from_config(config)
        self.dtype = dtype
        self.cache = KvCache(shape.layers, slots, shape.kv_heads, max_context, shape.head_dim, dtype)
        self.kv_shape = KvShape(shape.layers, shape.kv_heads, shape.head_dim, dtype)
        self._rotations = _rotations(config, max_context)
        self.weights = self.prepare(weights)

    def prepare(self, named: Iterable[tuple[str, Tensor]]) -> DecoderWeights:
        """Check and lay out weights without using them yet; assign the result to `weights` to do so.

        Raises `WeightsMismatch` on tensors that are missing, unmatched or wrongly shaped.
        """
        shape = self.shape
        found = dict(named)
        _require_match(found, shape)
        with torch.inference_mode():
            tensors = {name: found[name].detach().to("cpu", self.dtype) for name in shape.tensors()}
            embedding = tensors["model.embed_tokens.weight"].clone()
            return DecoderWeights(
                embedding=embedding,
                layers=[_layer(tensors, f"model.layers.{index}.", shape) for index in range(shape.layers)],
                norm=tensors["model.norm.weight"].clone(),
                head=Linear(embedding if shape.tied else tensors["lm_head.weight"].clone(), None),
            )

    @torch.inference_mode()
    def forward(self, rows: Rows, contexts: NDArray[np.int32]) -> Tensor:
        """Compute the rows' tokens, keep their K and V; return logits [sampled rows, vocabulary], float32.

        `contexts` holds token ids [slots, max_context]. Rows must be of different slots.
        """
        weights, shape, epsilon = self.weights, self.shape, self.shape.norm_epsilon
        batch = arrange(rows, contexts, self.cache)
        rotation = self._rotations.index_select(0, batch.positions).unsqueeze(1)  # [T, 1, head_dim / 2]
        x = F.embedding(batch.token_ids, weights.embedding)  # [T, hidden]
        size = (shape.hidden,)
        for layer, cached in zip(weights.layers, self.cache.layers, strict=True):
            qkv = layer.qkv(F.rms_norm(x, size, layer.attention_norm, epsilon))
            self._rotate(qkv, layer, rotation)
            x.add_(layer.output(attend(qkv, batch, cached, shape.heads)))
            gate_up = layer.gate_up(F.rms_norm(x, size, layer.mlp_norm, epsilon))
            gate, up = gate_up.split(shape.intermediate, dim=1)
            x.add_(layer.down(F.silu(gate).mul_(up)))
        x = x.index_select(0, batch.sampled)
        return weights.head(F.rms_norm(x, size, weights.norm, epsilon)).float()

    def _rotate(self, qkv: Tensor, layer: LayerWeights, rotation: Tensor) -> None:
        """Apply q/k norm and RoPE in place to q and k of [T, (heads + 2 kv_heads) * head_dim]."""
        shape = self.shape
        rotated_heads = shape.heads + shape.kv_heads
        qk = qkv[:, : rotated_heads * shape.head_dim].view(-1, rotated_heads, shape.head_dim)
        if layer.q_norm is not None:
            size, epsilon = (shape.head_dim,), shape.norm_epsilon
            query, key = qk[:, : shape.heads], qk[:, shape.heads :]
            query.copy_(F.rms_norm(query, size, layer.q_norm, epsilon))
            key.copy_(F.rms_norm(key, size, layer.k_norm, epsilon))
        pairs = qk.view(-1, rotated_heads, shape.head_dim // 2, 2)
        if pairs.dtype == torch.float32:
            torch.view_as_complex(pairs).mul_(rotation)
        else:
            pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(rotation)))


def _rotations(config: Any, max_context: int) -> Tensor:
    """RoPE as complex numbers [max_context, head_dim / 2], from the model's own rope parameters."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = LlamaRotaryEmbedding(config)
    angles = torch.arange(max_context).float()[:, None] * rope.inv_freq.float()
    return torch.complex(angles.cos() * rope.attention_scaling, angles.sin() * rope.attention_scaling)


def _require_match(found: dict[str, Tensor], shape: DecoderShape) -> None:
    expected = shape.tensors()
    faults = [f"missing: {name}" for name in expected if name not in found]
    for name, tensor in found.items():
        if name == "lm_head.weight" and shape.tied:
            if not torch.equal(tensor, found.get("model.embed_tokens.weight", tensor)):
                faults.append("lm_head.weight differs from the embedding it is tied to")
        elif name not in expected:
            faults.append(f"unmatched: {name}")
        elif tuple(tensor.shape) != expected[name]:
            faults.append(f"{name} is {list(tensor.shape)}, not {list(expected[name])}")
        elif not tensor.is_floating_point():
            faults.append(f"{name} is {tensor.dtype}, not a floating-point type")
    if faults:
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise WeightsMismatch("the weights do not fit the model: " + "; ".join(faults[:8]) + more)


def _layer(tensors: dict[str, Tensor], prefix: str, shape: DecoderShape) -> LayerWeights:
    half = shape.head_dim // 2
    interleaved = torch.arange(shape.head_dim).view(2, half).t().reshape(-1)  # 0, half, 1, half + 1, ...

    def fused(names: list[str], suffix: str, rotated: tuple[str, ...] = ()) -> Tensor | None:
        parts = []
        for name in names:
            tensor = tensors.get(f"{prefix}{name}.{suffix}")
            if tensor is None:
                return None
            if name in rotated:
                by_head = tensor.view(-1, shape.head_dim, *tensor.shape[1:])
                tensor = by_head.index_select(1, interleaved).view(tensor.shape)
            parts.append(tensor)
        return torch.cat(parts)

    def linear(*names: str, rotated: tuple[str, ...] = ()) -> Linear:
        weight = fused(list(names), "weight", rotated)
        assert weight is not None
        return Linear(weight, fused(list(names), "bias", rotated))

    query, key = "self_attn.q_proj", "self_attn.k_proj"
    q_norm = fused(["self_attn.q_norm"], "weight", ("self_attn.q_norm",))
    return LayerWeights(
        attention_norm=tensors[f"{prefix}input_layernorm.weight"].clone(),
        qkv=linear(query, key, "self_attn.v_proj", rotated=(query, key)),
        q_norm=q_norm,
        k_norm=fused(["self_attn.k_norm"], "weight", ("self_attn.k_norm",)),
        output=linear("self_attn.o_proj"),
        mlp_norm=tensors[f"{prefix}post_attention_layernorm.weight"].clone(),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )
