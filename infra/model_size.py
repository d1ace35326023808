"""What a model needs in memory, from its Hugging Face configuration: weights, KV, training state and more.

For the families that Tutti trains: Llama, Qwen2, Qwen3, Qwen3-MoE. `python -m infra.model_size` prints the
table of `infra/deploy/SIZES.md`. All sizes are bytes, GB are 10**9 bytes, as GPUs are sold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, gcd
from typing import Any

BF16, FP32 = 2, 4
STATE_BYTES = BF16 + FP32 + FP32 + 2 * FP32
"""Of one trained parameter: bfloat16 weight, float32 gradient, master weight, and AdamW's two moments."""
MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")


class UnknownModel(ValueError):
    """A configuration of another family: its sizes would be guesses."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Counts of one model. H hidden, Q query width, K width of keys (and of values), F width of the MLP."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dense_layers: int
    dense_width: int  # F of a dense layer's MLP
    experts: int  # of a mixture layer; 0 without one
    active_experts: int
    expert_width: int
    tied: bool
    attention_bias: int  # bias parameters of one layer's attention
    qk_norm: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ModelSize":
        """From the content of config.json. Raises `UnknownModel`."""
        kind = config.get("model_type")
        if kind not in MODEL_TYPES:
            raise UnknownModel(f"model_type {kind!r} is none of {', '.join(MODEL_TYPES)}")
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        layers = config["num_hidden_layers"]
        moe = kind == "qwen3_moe"
        only_dense = set(config.get("mlp_only_layers") or []) if moe else set(range(layers))
        sparse_step = config.get("decoder_sparse_step", 1) if moe else 1
        dense = sum(layer in only_dense or (layer + 1) % sparse_step != 0 for layer in range(layers))
        bias = (heads + 2 * kv_heads) * head_dim if kind == "qwen2" else 0
        if kind != "qwen2" and config.get("attention_bias"):
            bias = (heads + 2 * kv_heads) * head_dim + config["hidden_size"]
        return cls(
            layers=layers,
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=config["vocab_size"],
            dense_layers=dense,
            dense_width=config["intermediate_size"],
            experts=(config.get("num_experts") or config["num_local_experts"]) if moe else 0,
            active_experts=config["num_experts_per_tok"] if moe else 0,
            expert_width=config["moe_intermediate_size"] if moe else 0,
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bias,
            qk_norm=kind in ("qwen3", "qwen3_moe"),
        )

    @property
    def parameters(self) -> int:
        return self._parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """That one token passes through; all of them in a dense model."""
        return self._parameters(self.active_experts)

    def _parameters(self, experts: int) -> int:
        mixture = self.expert_parameters * experts + self.hidden * self.experts
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        layers = self.layers * self.attention_parameters
        layers += self.dense_layers * self.dense_parameters + self.mixture_layers * mixture
        return embeddings + layers + self.hidden

    @property
    def attention_parameters(self) -> int:
        """Of one layer: projections, biases and norms, the layer's own two among them."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (query + key) + self.attention_bias
        return attention + (2 * self.head_dim if self.qk_norm else 0) + 2 * self.hidden

    @property
    def dense_parameters(self) -> int:
        """Of one dense layer's MLP."""
        return 3 * self.hidden * self.dense_width

    @property
    def expert_parameters(self) -> int:
        """Of one expert of a mixture layer."""
        return 3 * self.hidden * self.expert_width

    @property
    def mixture_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def embedding_parameters(self) -> int:
        """Of one table: the embeddings, and as many again in an untied output layer."""
        return self.vocabulary * self.hidden

    @property
    def weight_bytes(self) -> int:
        """In bfloat16: what an engine holds and what one full publication carries."""
        return BF16 * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """In bfloat16: keys and values of every layer."""
        return BF16 * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def state_bytes(self) -> int:
        """Of full training: weights, gradients, master weights and AdamW's moments."""
        return STATE_BYTES * self.parameters

    @property
    def checkpoint_bytes(self) -> int:
        """Master weights and moments in float32."""
        return 3 * FP32 * self.parameters

    def activation_bytes(self, tokens: int, logit_tokens: int = 1024) -> int:
        """Of one micro-batch of `tokens` with activation checkpointing, in bfloat16 (an estimate).

        Kept: each layer's input, H a token. Besides, what the backward pass computes again of one layer
        (fused attention keeps no scores: norms, q, k, v, attention, residuals and the MLP's gate, up,
        product: 5 H + 2 Q + 2 K + 3 F of the experts that a token passes through), and logits with their
        gradient in float32 for `logit_tokens` at a time. After Korthikanti et al. 2022 (arXiv:2205.05198),
        section 4, for a gated MLP and grouped queries.
        """
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        width = max(self.dense_width if self.dense_layers else 0, self.expert_width * self.active_experts)
        layer = 5 * self.hidden + 2 * query + 2 * key + 3 * width
        logits = 2 * FP32 * min(tokens, logit_tokens) * self.vocabulary
        return tokens * BF16 * (self.layers * self.hidden + layer) + logits

    def rollout_gpus(self, gpu_bytes: float, tokens: int, share: float = 0.9) -> int | None:
        """GPUs of one engine (its tensor parallelism) that hold the weights and KV of `tokens` in all.

        The smallest power of two that divides the query heads, up to 16; None when none is enough. Each GPU
        has at least one KV head, so beyond `kv_heads` GPUs the KV is replicated.
        """
        for gpus in (1, 2, 4, 8, 16):
            if self.heads % gpus:
                continue
            kv = tokens * self.kv_bytes_per_token / gcd(gpus, self.kv_heads)
            if self.weight_bytes / gpus + kv <= share * gpu_bytes:
                return gpus
        return None

    def training_gpus(self, gpu_bytes: float, tokens: int, share: float = 0.9) -> int:
        """GPUs over which full training fits: its state sharded over all, `tokens` a micro-batch on each."""
        left = share * gpu_bytes - self.activation_bytes(tokens)
        if left <= 0:
            raise ValueError(f"a micro-batch of {tokens} tokens alone does not fit: lower micro_batch_tokens")
        return ceil(self.state_bytes / left)


def dense_config(kind: str, sizes: Sequence[int], tied: bool, **more: Any) -> dict[str, Any]:
    """`sizes`: layers, hidden, width of the MLP, heads, KV heads, vocabulary."""
    layers, hidden, width, heads, kv_heads, vocabulary = sizes
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        **more,
    }


def mixture_config(sizes: Sequence[int], width: int) -> dict[str, Any]:
    """Of 128 experts with MLPs of `width`, of which a token passes through 8."""
    return {
        **dense_config("qwen3_moe", sizes, False, head_dim=128),
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": width,
    }


PUBLIC = {
    "SmolLM2-135M": dense_config("llama", (30, 576, 1536, 9, 3, 49152), True),
    "Qwen3-0.6B": dense_config("qwen3", (28, 1024, 3072, 16, 8, 151936), True, head_dim=128),
    "Qwen3-1.7B": dense_config("qwen3", (28, 2048, 6144, 16, 8, 151936), True, head_dim=128),
    "Qwen3-4B": dense_config("qwen3", (36, 2560, 9728, 32, 8, 151936), True, head_dim=128),
    "Qwen2.5-7B": dense_config("qwen2", (28, 3584, 18944, 28, 4, 152064), False),
    "Llama-3.1-8B": dense_config("llama", (32, 4096, 14336, 32, 8, 128256), False),
    "Qwen3-8B": dense_config("qwen3", (36, 4096, 12288, 32, 8, 151936), False, head_dim=128),
    "Qwen3-14B": dense_config("qwen3", (40, 5120, 17408, 40, 8, 151936), False, head_dim=128),
    "Qwen3-30B-A3B": mixture_config((48, 2048, 6144, 32, 4, 151936), 768),
    "Qwen3-32B": dense_config("qwen3", (64, 5120, 25600, 64, 8, 151936), False, head_dim=128),
    "Llama-3.1-70B": dense_config("llama", (80, 8192, 28672, 64, 8, 128256), False),
    "Qwen3-235B-A22B": mixture_config((94, 4096, 12288, 64, 4, 151936), 1536),
}
"""What matters here of the published config.json of these models."""

ROLLOUT_TOKENS = 64 * 8192
TRAIN_TOKENS = 8192
GPUS = {"80 GB": 80e9, "96 GB": 96e9, "141 GB": 141e9}


def table() -> str:
    """The Markdown table of SIZES.md."""
    head = [
        "model",
        "parameters",
        "active",
        "weights GB",
        "KV KB/token",
        "training state GB",
        "activations GB",
    ]
    head += [f"rollout, {name}" for name in GPUS] + [f"training, {name}" for name in GPUS]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, config in PUBLIC.items():
        size = ModelSize.of(config)
        rollout = [size.rollout_gpus(memory, ROLLOUT_TOKENS) for memory in GPUS.values()]
        rows.append(
            [
                name,
                f"{size.parameters / 1e9:.2f}B",
                f"{size.active_parameters / 1e9:.2f}B",
                f"{size.weight_bytes / 1e9:.1f}",
                f"{size.kv_bytes_per_token / 1e3:.0f}",
                f"{size.state_bytes / 1e9:.1f}",
                f"{size.activation_bytes(TRAIN_TOKENS) / 1e9:.1f}",
                *["more than 16" if gpus is None else str(gpus) for gpus in rollout],
                *[str(size.training_gpus(memory, TRAIN_TOKENS)) for memory in GPUS.values()],
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    print(table())
