import math

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tasks.model.answer_form import form, measure_answer_form
from tasks.model.architecture import build_model
from tasks.model.config import TinyModelConfig, WarmUpConfig
from tasks.model.demonstrations import Demonstration
from tasks.model.warm_up import warm_up

TINY = TinyModelConfig(hidden_size=24, intermediate_size=40, layers=1, heads=3, max_context=64)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("\\boxed{7}", "\\boxed{10}", True),
        ("-8", "-17", True),
        ("-8", "8", False),
        ("left", "right", False),
        ("\\boxed{7}", "\\boxed{7", False),
        ("1 2", "12", False),
    ],
)
def test_answers_that_differ_in_numbers_only_have_one_form(one: str, other: str, alike: bool) -> None:
    assert (form(one) == form(other)) is alike


def demonstration(tokenizer: PreTrainedTokenizerFast, prompt: str, action: str) -> Demonstration:
    asked = tokenizer.encode(f"<|user|>{prompt}<|assistant|>")
    response = [*tokenizer.encode(action), tokenizer.eos_token_id]
    ids = np.array([*asked, *response], np.int32)
    return Demonstration(ids, np.arange(len(ids)) >= len(asked), [len(ids)])


def test_a_policy_without_preferences_is_rarely_valid_and_has_the_highest_entropy(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = build_model(TINY, tokenizer, seed=0).eval()
    torch.nn.init.zeros_(model.get_input_embeddings().weight)  # tied: every logit is 0
    items = [demonstration(tokenizer, "row 1 column 2", "left")]
    measured = measure_answer_form(model, tokenizer, items, ["left"], max_turn_tokens=3, seed=0)
    size = len(tokenizer)
    tokens = 1 + (1 - 1 / size) + (1 - 1 / size) ** 2  # expected length: each may be the end token
    assert measured.valid_share < 0.05
    assert measured.entropy == pytest.approx(tokens * math.log(size), rel=0.02)


def test_a_policy_that_learned_two_answers_is_valid_for_those_alone(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = build_model(TINY, tokenizer, seed=0)
    items = [demonstration(tokenizer, "row 1 column 2", action) for action in ("left", "7")]
    warm_up(model, {"two": items}, WarmUpConfig(steps=80, batch_size=8, learning_rate=3e-2), seed=0)
    both, left, number = (
        measure_answer_form(model, tokenizer, items, valid, max_turn_tokens=3, seed=0)
        for valid in (["left", "7"], ["left"], ["3"])
    )
    assert both.valid_share > 0.95
    assert 0.3 < left.valid_share < 0.7
    assert left.valid_share + number.valid_share == pytest.approx(both.valid_share)
    assert both.entropy == pytest.approx(math.log(2), abs=0.25)
    cut = measure_answer_form(model, tokenizer, items, ["left", "7"], max_turn_tokens=1, seed=0)
    assert cut.valid_share == 0  # no room for the end token


def test_measuring_leaves_the_random_state_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model(TINY, tokenizer, seed=0).eval()
    items = [demonstration(tokenizer, "row 1 column 2", "left")]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    measure_answer_form(model, tokenizer, items, ["left"], max_turn_tokens=3, seed=0, samples=4)
    assert torch.equal(torch.get_rng_state(), before)
