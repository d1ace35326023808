"""Golden values: the log-probabilities of the Hugging Face models themselves."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tasks.rollout.engines.attention import Rows
from tasks.rollout.engines.decoder import Decoder, UnsupportedModel, WeightsMismatch

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # wide, so that a wrong term moves the log-probabilities far more than 1e-4
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=6, tie_word_embeddings=True),
    "llama grouped": LlamaConfig(**SIZES, num_key_value_heads=2),
    "llama biased": LlamaConfig(**SIZES, num_key_value_heads=3, attention_bias=True, mlp_bias=True),
    "llama 3 rope": LlamaConfig(
        **SIZES,
        num_key_value_heads=2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "yarn rope": LlamaConfig(
        **SIZES,
        num_key_value_heads=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": Qwen2Config(
        **SIZES, num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
}


def make_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases start at 0 and norms at 1, where leaving them out would go unseen.
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def make_decoder(config: Any, model: Any, slots: int = 24, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(config, model.state_dict().items(), slots=slots, max_context=256, dtype=dtype)


def make_contexts(slots: int = 24) -> NDArray[np.int32]:
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], (slots, 256)).astype(np.int32)


def rows(*spans: tuple[int, int, int]) -> Rows:
    """(slot, first token, one past the last token) of each row, all sampled."""
    slots, starts, ends = (np.array(column) for column in zip(*spans, strict=True))
    return Rows(slots, starts, ends - starts, np.ones(len(slots), np.bool_))


def reference(model: Any, contexts: NDArray[np.int32], slot: int, length: int) -> torch.Tensor:
    with torch.no_grad():
        return (
            model(torch.from_numpy(contexts[slot : slot + 1, :length]).long()).logits[0, -1].log_softmax(-1)
        )


def difference(
    model: Any, decoder: Decoder, contexts: NDArray[np.int32], *spans: tuple[int, int, int]
) -> float:
    found = decoder.forward(rows(*spans), contexts).log_softmax(-1)
    expected = torch.stack([reference(model, contexts, slot, end) for slot, _, end in spans])
    return float((found - expected).abs().max())


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_are_those_of_the_hugging_face_model(name: str) -> None:
    model = make_model(CONFIGS[name])
    decoder = make_decoder(CONFIGS[name], model)
    contexts = make_contexts()
    # One request alone: prefill in chunks of unequal size, then decode.
    for start, end in ((0, 7), (7, 8), (8, 40), (40, 41), (41, 42)):
        assert difference(model, decoder, contexts, (5, start, end)) < 1e-4
    # Mixed: short and long prefills, continued ones, decodes at short and long contexts, scattered slots.
    decoder.forward(rows((0, 0, 9), (2, 0, 60), (9, 0, 1), (17, 0, 200)), contexts)
    mixed = [(0, 9, 10), (2, 60, 61), (9, 1, 2), (17, 200, 201), (5, 42, 43)]
    mixed += [(1, 0, 6), (3, 0, 5), (20, 0, 33), (21, 0, 1), (8, 0, 150)]
    assert difference(model, decoder, contexts, *mixed) < 1e-4
    continued = [(1, 6, 12), (3, 5, 6), (20, 33, 36), (8, 150, 151), (17, 201, 210), (2, 61, 64)]
    assert difference(model, decoder, contexts, *continued) < 1e-4


def test_a_batch_of_decodes_at_one_position_needs_no_mask() -> None:
    config = CONFIGS["llama grouped"]
    model, contexts = make_model(config), make_contexts()
    decoder = make_decoder(config, model)
    spans = [(slot, 0, 12) for slot in range(20)]
    assert difference(model, decoder, contexts, *spans) < 1e-4
    assert difference(model, decoder, contexts, *((slot, 12, 13) for slot in range(20))) < 1e-4


def test_only_sampled_rows_return_logits_in_the_order_given() -> None:
    config = CONFIGS["llama"]
    model, contexts = make_model(config), make_contexts()
    decoder = make_decoder(config, model)
    batch = rows((7, 0, 3), (1, 0, 30), (4, 0, 1), (2, 0, 3))
    batch.sampled[1] = False
    logits = decoder.forward(batch, contexts).log_softmax(-1)
    assert logits.shape == (3, 97)
    for row, (slot, length) in enumerate(((7, 3), (4, 1), (2, 3))):
        torch.testing.assert_close(logits[row], reference(model, contexts, slot, length), atol=1e-4, rtol=0)


def test_bfloat16_is_close_to_the_hugging_face_model_in_float32() -> None:
    config = CONFIGS["qwen3"]
    model, contexts = make_model(config), make_contexts()
    decoder = make_decoder(config, model, dtype=torch.bfloat16)
    found = decoder.forward(rows((0, 0, 20), (1, 0, 5)), contexts).softmax(-1)
    assert found.dtype == torch.float32
    for row, (slot, length) in enumerate(((0, 20), (1, 5))):
        expected = reference(model, contexts, slot, length).exp()
        assert float((found[row] - expected).abs().sum()) < 0.2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "missing: model.layers.1.mlp.up_proj.weight"),
        (lambda w: w.update({"model.layers.9.x": torch.zeros(1)}), "unmatched: model.layers.9.x"),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight is \[3\], not \[48\]",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(48, dtype=torch.int32)}),
            "model.norm.weight is torch.int32",
        ),
        (lambda w: w.update({"lm_head.weight": torch.zeros(97, 48)}), "lm_head.weight differs"),
    ],
)
def test_weights_that_do_not_fit_are_named_and_the_old_ones_kept(change: Any, message: str) -> None:
    config = CONFIGS["llama"]
    model, contexts = make_model(config), make_contexts()
    decoder = make_decoder(config, model)
    before = decoder.forward(rows((0, 0, 20)), contexts)
    changed = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    change(changed)
    with pytest.raises(WeightsMismatch, match=message):
        decoder.weights = decoder.prepare(changed.items())
    assert torch.equal(decoder.forward(rows((1, 0, 0 + 20)), np.roll(contexts, 1, axis=0)), before)


def test_new_weights_replace_all_of_the_old() -> None:
    config, contexts = CONFIGS["qwen3"], make_contexts()
    decoder = make_decoder(config, make_model(config))
    torch.manual_seed(1)
    other = AutoModelForCausalLM.from_config(config).eval()
    decoder.weights = decoder.prepare(other.state_dict().items())
    with torch.no_grad():
        expected = [reference(other, contexts, 0, 20)]
        for parameter in other.parameters():
            parameter.zero_()  # the decoder must hold copies of its own
    found = decoder.forward(rows((0, 0, 20)), contexts).log_softmax(-1)
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MistralConfig(**SIZES), "model_type 'mistral'"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "hidden_act 'gelu'"),
        (Qwen2Config(**SIZES, use_sliding_window=True), "use_sliding_window"),
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type 'dynamic'",
        ),
    ],
)
def test_a_model_it_cannot_compute_is_refused(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        Decoder(config, [], slots=1, max_context=16)
