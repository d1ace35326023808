import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from infra.model_size import PUBLIC, ModelSize, UnknownModel, table

PAGE = Path(__file__).parents[2] / "infra" / "deploy" / "SIZES.md"

PARAMETERS = {
    "SmolLM2-135M": 134_515_008,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen2.5-7B": 7_615_616_512,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.1-70B": 70_553_706_496,
    "Qwen3-235B-A22B": 235_093_634_560,
}
"""As the published checkpoints count them."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_published_models(name):
    assert ModelSize.of(PUBLIC[name]).parameters == PARAMETERS[name]


def test_active_parameters_of_mixtures_are_those_in_their_names():
    assert ModelSize.of(PUBLIC["Qwen3-30B-A3B"]).active_parameters / 1e9 == pytest.approx(3.3, abs=0.1)
    assert ModelSize.of(PUBLIC["Qwen3-235B-A22B"]).active_parameters / 1e9 == pytest.approx(22, abs=0.5)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 24}),
        (
            "qwen3_moe",
            {
                "head_dim": 16,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 40,
                "decoder_sparse_step": 2,
                "mlp_only_layers": [3],
            },
        ),
    ],
)
def test_parameters_are_those_that_transformers_makes(kind, more):
    config = AutoConfig.for_model(
        kind,
        **{
            "num_hidden_layers": 5,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 300,
            **more,
        },
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert ModelSize.of(json.loads(config.to_json_string())).parameters == model.num_parameters()


def test_bytes_of_a_small_model_by_hand():
    """One layer, H 8, 2 heads of 4, 1 KV head, F 16, 10 tokens, untied: attention 8(8+4+4+8) = 192, MLP 384,
    norms 16 and 8, embeddings 160; 760 in all."""
    size = ModelSize.of(
        {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": 8,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 16,
            "vocab_size": 10,
        }
    )
    assert size.parameters == size.active_parameters == 760
    assert size.weight_bytes == 1520
    assert size.kv_bytes_per_token == 16  # keys and values of 4, two bytes each
    assert size.state_bytes == 18 * 760
    assert size.checkpoint_bytes == 12 * 760
    # a token: 2 bytes of input 8 and layer 5*8 + 2*8 + 2*4 + 3*16 = 112; logits of 2 tokens: 2 * 2*4*10
    assert size.activation_bytes(3, logit_tokens=2) == 3 * 2 * (8 + 112) + 160
    assert size.rollout_gpus(1520 / 0.9 + 1, 0) == 1
    assert size.rollout_gpus(1519 / 0.9, 0) == 2
    # the one KV head is on both GPUs: 760 of weights and 16 of each token
    assert size.rollout_gpus((760 + 16 * 10) / 0.9 + 1, 10) == 2
    assert size.rollout_gpus((760 + 16 * 10 - 1) / 0.9, 10) is None
    assert size.training_gpus((18 * 760 / 4 + size.activation_bytes(3)) / 0.9 + 1, 3) == 4
    with pytest.raises(ValueError, match="micro_batch_tokens"):
        size.training_gpus(100, 3)


def test_another_family_is_refused():
    with pytest.raises(UnknownModel, match="'mamba'"):
        ModelSize.of({"model_type": "mamba"})


def test_the_page_has_the_table_that_the_function_makes():
    assert table() in PAGE.read_text()
