import math

import numpy as np
import pytest
import torch

from tasks.rollout.engines.sampling import NonFiniteLogits, SlotSampling, draws, sample

# The 0.9999 quantile of chi-square with 5 degrees of freedom (from its tables); the seeds are fixed.
CHI_SQUARE_5_9999 = 25.74


def distribution(logits: list[float], temperature: float) -> np.ndarray:
    weights = np.exp(np.array(logits, np.float64) / temperature)
    return weights / weights.sum()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_tokens_follow_the_tempered_distribution(temperature: float) -> None:
    logits = [0.3, -1.2, 2.0, 0.0, -0.4, 1.1]
    count = 20_000
    uniform = np.concatenate([draws(seed, 8) for seed in range(count // 8)])
    tokens, logprobs = sample(
        torch.tensor([logits]).expand(count, -1), np.full(count, temperature, np.float32), uniform
    )
    expected = distribution(logits, temperature)
    observed = np.bincount(tokens, minlength=6)
    assert float(((observed - count * expected) ** 2 / (count * expected)).sum()) < CHI_SQUARE_5_9999
    np.testing.assert_allclose(logprobs, np.log(expected)[tokens], atol=1e-5)


def test_the_distribution_is_inverted_at_the_draw() -> None:
    # Cumulative 0.25, 0.75, 1: a draw lands on the first token whose cumulative probability is above it.
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log()
    for uniform, token in ((0.0, 0), (0.2, 0), (0.3, 1), (0.7, 1), (0.8, 2), (1 - 2**-53, 2)):
        tokens, _ = sample(logits, np.ones(1, np.float32), np.array([uniform]))
        assert tokens.tolist() == [token]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_sampled(uniform: float) -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    tokens, logprobs = sample(logits, np.ones(1, np.float32), np.array([uniform]))
    assert tokens[0] in (1, 3)
    assert logprobs[0] == pytest.approx(math.log(0.5))


def test_temperature_zero_takes_the_most_probable_token_beside_sampled_rows() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]] * 2)
    tokens, logprobs = sample(logits, np.array([0.0, 0.5], np.float32), np.array([0.0, 0.0]))
    assert tokens.tolist() == [2, 0]
    assert logprobs[0] == pytest.approx(math.log(distribution([0, 1, 3, 2], 1.0)[2]), abs=1e-6)
    assert logprobs[1] == pytest.approx(math.log(distribution([0, 1, 3, 2], 0.5)[0]), abs=1e-5)


def test_draws_depend_on_seed_and_index_alone() -> None:
    assert draws(7, 5).tolist() == draws(7, 50)[:5].tolist()
    assert draws(7, 5).tolist() != draws(8, 5).tolist()
    assert (draws(-3, 1000) >= 0).all()
    assert (draws(2**70, 1000) < 1).all()
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    crowded = SlotSampling(4, 16)
    for slot, seed in ((0, 5), (1, 6), (3, 7)):
        crowded.begin(slot, seed, 1.0, 16)
    together, _ = crowded.sample(logits, np.array([3, 0, 1]), np.array([2, 9, 0]))
    alone = SlotSampling(1, 16)
    for row, (seed, index) in enumerate(((7, 2), (5, 9), (6, 0))):
        alone.begin(0, seed, 1.0, 16)
        token, _ = alone.sample(logits[row : row + 1], np.array([0]), np.array([index]))
        assert token[0] == together[row]


def test_a_continued_turn_goes_on_with_the_draws_of_the_interrupted_one() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    whole, rest = SlotSampling(1, 16), SlotSampling(1, 16)
    whole.begin(0, 5, 1.0, 16)
    rest.begin(0, 5, 1.0, 10, first=6)
    for index in range(10):
        expected, _ = whole.sample(logits, np.array([0]), np.array([6 + index]))
        found, _ = rest.sample(logits, np.array([0]), np.array([index]))
        assert found[0] == expected[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_logits_are_an_error(temperature: float, value: float) -> None:
    logits = torch.zeros(2, 8)
    logits[1, 3] = value
    with pytest.raises(NonFiniteLogits):
        sample(logits, np.full(2, temperature, np.float32), np.array([0.5, 0.5]))
