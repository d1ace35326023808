"""Per-token losses and how they add up to the loss of an optimiser step.

All per-token tensors are [batch, time]; `mask` is True on the tokens that are trained.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.train.config import Aggregation
from tasks.train.kl import log_ratio


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """The denominators of one optimiser step, counted over all its micro-batches and data-parallel ranks."""

    tokens: int  # trained tokens
    sequences: int  # trajectories with at least one trained token


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The policy-gradient term, each [batch, time]."""

    loss_BT: Tensor  # differentiable
    ratio_BT: Tensor  # pi_current / pi_proximal, detached; 1 off the mask
    clipped_BT: Tensor  # True where a bound replaced the ratio, and so removed the gradient


def policy_gradient_loss(
    logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), negated, with separate bounds.

    With r = pi / pi_proximal: -min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A). Clip-higher is DAPO's
    (arXiv:2503.14476). `dual_clip` c > 1 also bounds the loss of a negative advantage by -c·A
    (arXiv:1912.09729, eq. 5). Raises ValueError when c ≤ 1.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, not {dual_clip}")
    advantages_BT = torch.where(mask_BT, advantages_BT, 0.0)
    ratio_BT = log_ratio(logprobs_BT, proximal_logprobs_BT, mask_BT).exp()
    free_BT = -advantages_BT * ratio_BT
    bounded_BT = -advantages_BT * ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = torch.maximum(free_BT, bounded_BT)
    clipped_BT = bounded_BT > free_BT
    if dual_clip is not None:
        ceiling_BT = -advantages_BT * dual_clip
        above_BT = (advantages_BT < 0) & (loss_BT > ceiling_BT)
        loss_BT = torch.where(above_BT, ceiling_BT, loss_BT)
        clipped_BT = clipped_BT | above_BT
    return Surrogate(loss_BT, ratio_BT.detach(), clipped_BT)


def entropy(log_probabilities_NV: Tensor) -> Tensor:
    """Entropy in nats of each of N distributions over V tokens; differentiable. Impossible tokens add 0."""
    floor = torch.finfo(log_probabilities_NV.dtype).min
    return -(log_probabilities_NV.exp() * log_probabilities_NV.clamp(min=floor)).sum(-1)


def aggregate(
    values_BT: Tensor,
    mask_BT: Tensor,
    aggregation: Aggregation,
    counts: BatchCounts,
    *,
    sequence_tokens_B: Tensor | None = None,
    constant: float | None = None,
    dp_size: int = 1,
) -> Tensor:
    """One micro-batch's share of the loss: the shares of all micro-batches of a step sum to the step's loss.

    Every mode is a sum over the mask with a weight that depends on counts of the *whole* step, so the result
    is the same however the step was cut:

    | aggregation | weight of a token |
    |---|---|
    | token_mean | 1 / counts.tokens |
    | token_sum | 1 |
    | sequence_mean_token_sum | 1 / counts.sequences |
    | sequence_mean_token_mean | 1 / (counts.sequences x its trajectory's trained tokens) |
    | sequence_sum_constant | 1 / (counts.sequences x constant): Dr.GRPO, arXiv:2503.20783 |

    `sequence_tokens_B` are the trained tokens of each row's trajectory; without it a row is a whole one.
    `dp_size` undoes the averaging of gradients over data-parallel ranks. With nothing on the mask the result
    is 0, still with a graph and zero gradients. Raises ValueError when `constant` and the mode disagree.
    """
    if (aggregation == "sequence_sum_constant") != (constant is not None):
        raise ValueError("aggregation_constant goes with aggregation sequence_sum_constant, and only with it")
    sums_B = torch.where(mask_BT, values_BT, 0.0).sum(-1)
    tokens, sequences = max(counts.tokens, 1), max(counts.sequences, 1)
    match aggregation:
        case "token_mean":
            total = sums_B.sum() / tokens
        case "token_sum":
            total = sums_B.sum()
        case "sequence_mean_token_sum":
            total = sums_B.sum() / sequences
        case "sequence_mean_token_mean":
            lengths_B = mask_BT.sum(-1) if sequence_tokens_B is None else sequence_tokens_B
            total = (sums_B / lengths_B.clamp(min=1)).sum() / sequences
        case "sequence_sum_constant":
            total = sums_B.sum() / (sequences * constant)  # type: ignore[operator]
    return total * dp_size
