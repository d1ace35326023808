import math

import pytest
import torch
from torch import Tensor

from tasks.train.config import KlEstimator
from tasks.train.kl import kl_penalty, log_ratio

MASK = torch.tensor([[True, True]])
# d = log(policy / reference) = (0.5, -0.4).
POLICY = [[-1.0, -2.4]]
REFERENCE = torch.tensor([[-1.5, -2.0]], dtype=torch.float64)


def _policy(values: list[list[float]] = POLICY) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        ("k1", [0.5, -0.4], [0.5, -0.4]),
        ("k2", [0.125, 0.08], [0.5, -0.4]),
        # e^-0.5 - 1 + 0.5 and e^0.4 - 1 - 0.4; 1 - e^-0.5 and 1 - e^0.4.
        (
            "k3",
            [0.10653065971263342, 0.09182469764127026],
            [0.3934693402873666, -0.49182469764127026],
        ),
    ],
)
def test_values_and_gradients(estimator: KlEstimator, values: list[float], gradients: list[float]) -> None:
    policy = _policy()
    penalty = kl_penalty(policy, REFERENCE, MASK, estimator)
    penalty.sum().backward()
    torch.testing.assert_close(penalty.detach()[0], torch.tensor(values, dtype=torch.float64))
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad[0], torch.tensor(gradients, dtype=torch.float64))


def _expected_gradient(estimator: KlEstimator, logits: Tensor, reference: Tensor) -> Tensor:
    """The exact expectation, over samples of the policy, of the estimator's gradient."""
    probabilities = torch.softmax(logits, -1).detach()
    logprobs = torch.log_softmax(logits, -1)
    penalty = kl_penalty(
        logprobs[None], torch.log_softmax(reference, -1)[None], torch.ones(1, 4, dtype=torch.bool), estimator
    )
    (gradient,) = torch.autograd.grad((probabilities * penalty[0]).sum(), logits)
    return gradient


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_expected_gradients_are_those_of_the_documented_divergences(estimator: KlEstimator) -> None:
    logits = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, 0.2, -0.3], dtype=torch.float64)
    p, q = torch.softmax(logits, -1), torch.softmax(reference, -1)
    divergence = (q * (q / p).log()).sum() if estimator == "k3" else (p * (p / q).log()).sum()
    (exact,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(_expected_gradient(estimator, logits, reference), exact)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_have_the_divergence_as_expected_value(estimator: KlEstimator) -> None:
    p = torch.softmax(torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64), -1)
    q = torch.softmax(torch.tensor([0.1, 0.4, 0.2, -0.3], dtype=torch.float64), -1)
    penalty = kl_penalty(p.log()[None], q.log()[None], torch.ones(1, 4, dtype=torch.bool), estimator)
    torch.testing.assert_close((p * penalty[0]).sum(), (p * (p / q).log()).sum())


def test_bounds_hold_before_anything_overflows() -> None:
    policy = _policy([[-500.0, 0.0]])
    reference = torch.tensor([[0.0, -500.0]], dtype=torch.float64)
    assert log_ratio(policy, reference, MASK).tolist() == [[-20.0, 20.0]]
    k3 = kl_penalty(policy, reference, MASK, "k3")
    assert k3.tolist() == [[10.0, 10.0]]  # e^20 - 21 and e^-20 + 19, both above the bound
    k3.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [[0.0, 0.0]]
    assert kl_penalty(policy, reference, MASK, "k2").tolist() == [[200.0, 200.0]]


def test_k1_still_pulls_beyond_the_bound() -> None:
    policy = _policy([[-500.0, 0.0]])
    kl_penalty(policy, torch.tensor([[0.0, -500.0]], dtype=torch.float64), MASK, "k1").sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [[-20.0, 20.0]]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("placeholder", [math.nan, math.inf, -math.inf, 0.0])
def test_nothing_leaks_from_behind_the_mask(estimator: KlEstimator, placeholder: float) -> None:
    policy = _policy([[-1.0, placeholder]])
    mask = torch.tensor([[True, False]])
    penalty = kl_penalty(policy, torch.tensor([[-1.5, placeholder]], dtype=torch.float64), mask, estimator)
    penalty.sum().backward()
    assert penalty[0, 1] == 0
    assert policy.grad is not None
    assert policy.grad[0, 1] == 0
    assert policy.grad[0, 0] > 0
