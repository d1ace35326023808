"""A model and a device whose figures can be worked out by hand."""

from infra.hardware import Hardware
from infra.model_size import ModelSize
from infra.performance.coefficients import IterationCoefficients

DENSE = ModelSize.of(
    {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 10,
    }
)
"""2 layers of 4 heads of 2 and 2 KV heads: attention 8 (8 + 4 + 4 + 8) + 16 of norms = 208, MLP 3 x 8 x 16 =
384, tables of 80 each."""

MIXTURE = ModelSize.of(
    {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "intermediate_size": 16,
        "moe_intermediate_size": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 10,
    }
)
"""One layer: attention 208 + 4 of the norms of queries and keys, 4 experts of 3 x 8 x 4 = 96, router 32."""

DEVICE = Hardware(
    name="round",
    kind="gpu",
    tflops=1e-6,  # 10**6 operations a second
    memory_gb=1e-5,  # 10 000 bytes
    bandwidth_tb_s=1e-6,  # 10**6 bytes a second
    cost=1.0,
    source="[test]",
    link_gb_s=1e-4,  # 10**5 bytes a second
    network_gb_s=1e-5,
)

IDEAL = IterationCoefficients(
    gemm_compute=1,
    gemm_bandwidth=1,
    expert_compute=1,
    expert_bandwidth=1,
    mixture_s=0,
    attention_compute=1,
    decode_attention_compute=1,
    kv_bandwidth=1,
    layer_s=0,
    iteration_s=0,
    sequence_s=0,
    collective_s=0,
    hop_s=0,
    direct_s=0,
    link_share=1,
    expert_imbalance=1,
    reserved_bytes=0,
)
"""The bare roofline."""
