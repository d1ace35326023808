from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM

from tasks.train.trainers.logprobs import TokenLogprobs
from tests.train.trainers.models import tiny_llama

TOKENS = torch.tensor([[3, 7, 1, 9, 4, 2], [5, 5, 8, 0, 0, 0]])
MASK = torch.tensor([[0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]]).bool()
LENGTHS = (6, 3)


def _expected(model: torch.nn.Module, temperature: float) -> tuple[Tensor, Tensor]:
    """Each sequence by itself, unpadded, all logits, float64 after the model."""
    logprobs, entropy = torch.zeros(2, 6), torch.zeros(2, 6)
    for row, length in enumerate(LENGTHS):
        logits = model(TOKENS[row : row + 1, :length]).logits[0].double() / temperature
        log_probabilities = torch.log_softmax(logits, -1)
        for t in range(1, length):
            if MASK[row, t]:
                logprobs[row, t] = log_probabilities[t - 1, TOKENS[row, t]]
                entropy[row, t] = -(log_probabilities[t - 1].exp() * log_probabilities[t - 1]).sum()
    return logprobs, entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_tempered_distribution(tmp_path: Path, temperature: float) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_llama(tmp_path)).eval()
    with torch.no_grad():
        expected = _expected(model, temperature)
        found = TokenLogprobs(model, temperature)(TOKENS, MASK)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)


def test_what_a_model_does_after_its_head_still_holds() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=0.5,
        initializer_range=0.5,
        attn_implementation="eager",
    )
    model = Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        expected = _expected(model, 1.0)
        found = TokenLogprobs(model, 1.0)(TOKENS, MASK)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)


def test_only_trained_positions_reach_the_head(tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_llama(tmp_path)).eval()
    score = TokenLogprobs(model, 1.0)
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda _, __, logits: rows.append(logits.numel() // logits.shape[-1]))
    score(TOKENS, MASK)
    assert rows == [int(MASK.sum())]


def test_the_model_still_gives_all_logits_to_other_callers(tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_llama(tmp_path)).eval()
    TokenLogprobs(model, 1.0)(TOKENS, MASK)
    assert model(TOKENS).logits.shape == (2, 6, 32)


def test_what_follows_a_sequence_has_no_influence(tmp_path: Path) -> None:
    score = TokenLogprobs(LlamaForCausalLM.from_pretrained(tiny_llama(tmp_path)).eval(), 1.0)
    other = TOKENS.clone()
    other[1, 3:] = torch.tensor([11, 30, 17])
    with torch.no_grad():
        assert torch.equal(score(TOKENS, MASK)[0], score(other, MASK)[0])


def test_nothing_to_train_still_has_a_graph(tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_llama(tmp_path)).eval()
    logprobs, _ = TokenLogprobs(model, 1.0)(TOKENS, torch.zeros_like(MASK))
    logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("gradient", [True, False])
def test_entropy_has_a_graph_on_request_only(tmp_path: Path, gradient: bool) -> None:
    score = TokenLogprobs(LlamaForCausalLM.from_pretrained(tiny_llama(tmp_path)).eval(), 1.0)
    assert score(TOKENS, MASK, entropy_gradient=gradient)[1].requires_grad is gradient


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_names_the_option(tmp_path: Path, temperature: float) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_llama(tmp_path))
    with pytest.raises(ValueError, match=r"rollout\.temperature"):
        TokenLogprobs(model, temperature)
