"""Log-probabilities and entropies over a vocabulary that is split between tensor-parallel ranks.

The full logits are never gathered: three all-reduces of N numbers each take their place.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocabulary_parallel_logprobs(
    logits_NV: Tensor, chosen_N: Tensor, *, first: int, vocabulary: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """log p(chosen) and the entropy in nats of N distributions, float32 [N]; both differentiable.

    `logits_NV` are this rank's columns, of the tokens from `first` on; columns at or beyond `vocabulary` are
    padding and have probability 0. Collective over `group`, whose ranks get equal results.
    """
    logprobs_N, entropy_N = _VocabularyParallel.apply(logits_NV, chosen_N, first, vocabulary, group)
    return logprobs_N, entropy_N


class _VocabularyParallel(torch.autograd.Function):
    """With p = softmax(z): d log p_c / dz_j = [j = c] - p_j, and dH / dz_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(
        context: Any, logits_NV: Tensor, chosen_N: Tensor, first: int, vocabulary: int, group: Any
    ) -> tuple[Tensor, Tensor]:
        z_NV = logits_NV.float()
        padding = first + z_NV.shape[1] - vocabulary
        if padding > 0:
            z_NV = z_NV.clone()
            z_NV[:, max(z_NV.shape[1] - padding, 0) :] = torch.finfo(torch.float32).min
        greatest_N = z_NV.amax(-1)
        dist.all_reduce(greatest_N, dist.ReduceOp.MAX, group)
        z_NV = z_NV - greatest_N[:, None]
        local_N = chosen_N - first
        mine_N = (local_N >= 0) & (local_N < z_NV.shape[1])
        local_N = local_N.clamp(0, z_NV.shape[1] - 1)
        chosen_z_N = torch.where(mine_N, z_NV.gather(-1, local_N[:, None]).squeeze(-1), 0.0)
        p_NV = z_NV.exp()
        # sum e^z, sum e^z z, z of the chosen: all of them sums over ranks.
        sums_3N = torch.stack([p_NV.sum(-1), (p_NV * z_NV).sum(-1), chosen_z_N])
        dist.all_reduce(sums_3N, dist.ReduceOp.SUM, group)
        total_N, moment_N, chosen_z_N = sums_3N
        log_total_N = total_N.log()
        p_NV /= total_N[:, None]
        entropy_N = log_total_N - moment_N / total_N
        context.save_for_backward(p_NV, z_NV, log_total_N, entropy_N, local_N, mine_N)
        context.logits_dtype = logits_NV.dtype
        context.set_materialize_grads(False)
        return chosen_z_N - log_total_N, entropy_N

    @staticmethod
    def backward(context: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        p_NV, z_NV, log_total_N, entropy_N, local_N, mine_N = context.saved_tensors
        logprob_gradient_N, entropy_gradient_N = gradients
        total_NV: Tensor | None = None
        if logprob_gradient_N is not None:
            total_NV = -logprob_gradient_N[:, None] * p_NV
            total_NV.scatter_add_(1, local_N[:, None], torch.where(mine_N, logprob_gradient_N, 0.0)[:, None])
        if entropy_gradient_N is not None:
            log_p_NV = z_NV - log_total_N[:, None]
            part_NV = -entropy_gradient_N[:, None] * p_NV * (log_p_NV + entropy_N[:, None])
            total_NV = part_NV if total_NV is None else total_NV + part_NV
        return (None if total_NV is None else total_NV.to(context.logits_dtype)), None, None, None, None
