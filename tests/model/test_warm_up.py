import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tasks.campaign import Campaign
from tasks.environment.rendering import ChatRenderer
from tasks.model.architecture import build_model
from tasks.model.config import TinyModelConfig, WarmUpConfig
from tasks.model.demonstrations import Demonstration, PlayedEpisode, render
from tasks.model.warm_up import warm_up

TINY = TinyModelConfig(hidden_size=24, intermediate_size=40, layers=1, heads=3, max_context=64)


@pytest.fixture
def tiny(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return build_model(TINY, tokenizer, seed=0)


@pytest.fixture
def moves(
    campaign: Campaign,
    episodes: dict[str, list[PlayedEpisode]],
    renderer: ChatRenderer,
    tokenizer: PreTrainedTokenizerFast,
) -> list[Demonstration]:
    rendered = [
        render(campaign.domains["lake"], episode, renderer, tokenizer) for episode in episodes["lake"]
    ]
    return [item for item in rendered if item is not None]


def response_losses(model: LlamaForCausalLM, demonstration: Demonstration) -> list[float]:
    """Negative log-probability of each response token, in float64."""
    double = LlamaForCausalLM(model.config).double()
    double.load_state_dict(model.state_dict())
    ids = torch.from_numpy(demonstration.tokens.astype(np.int64))
    with torch.no_grad():
        logits = double(ids[None]).logits[0]
    return [
        float(torch.logsumexp(logits[position - 1], -1) - logits[position - 1, ids[position]])
        for position in np.flatnonzero(demonstration.loss_mask)
    ]


def test_the_loss_is_the_mean_over_the_response_tokens_of_the_batch(
    tiny: LlamaForCausalLM, moves: list[Demonstration]
) -> None:
    short, long = moves[0].first(1), moves[1].first(1)
    long = replace(long, tokens=np.concatenate([short.tokens, long.tokens[-8:]]))
    long = replace(long, loss_mask=np.arange(len(long.tokens)) >= len(long.tokens) - 5)
    long = replace(long, ends=[len(long.tokens)])  # of another length, with five response tokens
    losses = response_losses(tiny, short) + response_losses(tiny, long)
    result = warm_up(tiny, {"a": [short], "b": [long]}, WarmUpConfig(steps=1, batch_size=2), seed=0)
    assert len(losses) == 7
    assert result.losses == [pytest.approx(sum(losses) / 7, rel=1e-5)]
    assert result.trained_tokens == len(short.tokens) + len(long.tokens)


def test_the_same_seed_gives_the_same_weights(
    tokenizer: PreTrainedTokenizerFast, moves: list[Demonstration]
) -> None:
    weights = []
    for seed in (0, 0, 1):
        model = build_model(TINY, tokenizer, seed=0)
        warm_up(model, {"lake": moves}, WarmUpConfig(steps=3, batch_size=4), seed)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


def test_no_steps_leave_the_model_as_it_was(tiny: LlamaForCausalLM, moves: list[Demonstration]) -> None:
    before = {name: value.clone() for name, value in tiny.state_dict().items()}
    result = warm_up(tiny, {"lake": moves}, WarmUpConfig(steps=0), seed=0)
    assert result.losses == []
    assert all(torch.equal(before[name], value) for name, value in tiny.state_dict().items())


def test_the_loss_falls_to_the_entropy_of_the_actions(
    tiny: LlamaForCausalLM, moves: list[Demonstration]
) -> None:
    """Four moves, each as likely, and a sure end token: ln(4) / 2 nats a response token."""
    config = WarmUpConfig(steps=150, batch_size=12, learning_rate=2e-2)
    losses = warm_up(tiny, {"lake": moves}, config, seed=0).losses
    assert losses[0] > math.log(tiny.config.vocab_size) - 0.2  # knows nothing yet
    assert sum(losses[-30:]) / 30 == pytest.approx(math.log(4) / 2, abs=0.1)
