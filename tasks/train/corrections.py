"""Decoupled off-policy correction (AReaL, arXiv:2505.24298, eq. 5; truncated importance sampling).

The behaviour policy sampled the tokens, perhaps several versions ago; the proximal policy is the one that the
clipped ratio starts from. The weight pi_proximal / pi_behaviour carries from one to the other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.train.kl import k3, log_ratio


@dataclass(frozen=True, slots=True)
class Importance:
    """Weights, and what they were before truncation. Nothing here carries a gradient."""

    weights_BT: Tensor  # truncated; 1 off the mask
    ratio_sum: Tensor  # over the mask, before truncation
    ratio_max: Tensor  # over the mask, before truncation; 0 when the mask is empty
    truncated: Tensor  # how many tokens of the mask exceeded the cap
    kl_sum: Tensor  # k3 of KL(behaviour || target) over the mask


@torch.no_grad()
def importance_weights(
    target_logprobs_BT: Tensor, behaviour_logprobs_BT: Tensor, mask_BT: Tensor, cap: float | None
) -> Importance:
    """min(pi_target / pi_behaviour, cap) per token; without a cap the correction is off: all weights are 1.

    The log-ratio is clamped before `exp`. The statistics are always those of the true ratios.
    """
    log_ratio_BT = log_ratio(target_logprobs_BT, behaviour_logprobs_BT, mask_BT)
    ratio_BT = log_ratio_BT.exp()
    on_mask_BT = torch.where(mask_BT, ratio_BT, 0.0)
    if cap is None:
        weights_BT, truncated_BT = torch.ones_like(ratio_BT), torch.zeros_like(mask_BT)
    else:
        weights_BT = torch.where(mask_BT, ratio_BT.clamp(max=cap), 1.0)
        truncated_BT = on_mask_BT > cap
    return Importance(
        weights_BT=weights_BT,
        ratio_sum=on_mask_BT.sum(),
        ratio_max=on_mask_BT.max() if on_mask_BT.numel() else on_mask_BT.new_zeros(()),
        truncated=truncated_BT.sum(),
        kl_sum=k3(log_ratio_BT).sum(),
    )
