"""Per-token estimators of the KL divergence (http://joschu.net/blog/kl-approx.html), with bounded log-ratios.

All tensors are [batch, time]. Off the mask every result and every gradient is exactly 0.
"""

import torch
from torch import Tensor

from tasks.train.config import KlEstimator

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ±20 before `exp`, which then stays within float32."""
K3_BOUND = 10.0
"""k3 is clamped to ±10, so that one token cannot carry a batch."""


def log_ratio(numerator_BT: Tensor, denominator_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log(numerator / denominator) on the mask, clamped to ±`LOG_RATIO_BOUND`; 0 elsewhere.

    Beyond the bound the gradient is 0. Placeholders off the mask may be anything, infinite or NaN included.
    """
    difference_BT = torch.where(mask_BT, numerator_BT - denominator_BT, 0.0)
    return difference_BT.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def k3(log_ratio_BT: Tensor) -> Tensor:
    """exp(x) - 1 - x. For samples of q, x = log(p / q): an unbiased estimate of KL(q || p), never below 0."""
    return (torch.expm1(log_ratio_BT) - log_ratio_BT).clamp(-K3_BOUND, K3_BOUND)


def kl_penalty(
    logprobs_BT: Tensor, reference_logprobs_BT: Tensor, mask_BT: Tensor, estimator: KlEstimator
) -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token, for use in a loss.

    With d = log(policy / reference) and g = d log(policy) / d theta, for samples of the policy:

    | estimator | value | gradient | that is, in expectation |
    |---|---|---|---|
    | k1 | d | d·g | the gradient of KL(policy‖reference): the score form, as d's own gradient has mean 0 |
    | k2 | d²/2 | d·g | the same |
    | k3 | e⁻ᵈ - 1 + d | (1 - e⁻ᵈ)·g | the gradient of KL(reference‖policy), as in the GRPO paper |

    k1 is the unbiased value with the largest variance, k2 is biased, k3 is unbiased and non-negative. Beyond
    a bound (|d| > 20 for k2 and k3, k3 > 10) the gradient is 0; k1 keeps the bounded d as its coefficient.
    """
    d_BT = log_ratio(logprobs_BT, reference_logprobs_BT, mask_BT)
    if estimator == "k2":
        return 0.5 * d_BT.square()
    if estimator == "k3":
        return k3(-d_BT)
    coefficient_BT = d_BT.detach()
    score_BT = torch.where(mask_BT, logprobs_BT, 0.0)
    return coefficient_BT + coefficient_BT * (score_BT - score_BT.detach())
