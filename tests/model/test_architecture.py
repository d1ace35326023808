from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from tasks.model.architecture import build_model
from tasks.model.config import TinyModelConfig

CONFIG = TinyModelConfig(hidden_size=24, intermediate_size=40, layers=2, heads=3, max_context=64)


def test_has_the_parameters_of_its_configuration(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model(CONFIG, tokenizer, seed=0)
    embeddings = len(tokenizer) * 24  # tied, so counted once
    layer = 4 * 24 * 24 + 3 * 24 * 40 + 2 * 24  # attention, gated feed-forward, two norms
    assert model.num_parameters() == embeddings + 2 * layer + 24
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_the_seed_alone_determines_the_weights(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    for name, seed, noise in (("a", 5, 1), ("b", 5, 2), ("c", 6, 1)):
        torch.manual_seed(noise)
        build_model(CONFIG, tokenizer, seed).save_pretrained(tmp_path / name)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])


def test_building_leaves_the_random_state_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    build_model(CONFIG, tokenizer, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_saved_model_loads_with_its_end_token(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    settings = GenerationConfig.from_pretrained(directory)
    assert settings.eos_token_id == tokenizer.eos_token_id
    assert settings.pad_token_id == tokenizer.pad_token_id != settings.eos_token_id
