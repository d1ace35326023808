"""Runs one pipeline stage on a micro-batch; on the last stage, log-probabilities of the sampled tokens.

As in `tasks.train.trainers.logprobs`, only hidden states that predict a sampled token reach the head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from tasks.train.trainers.megatron.logprobs import vocabulary_parallel_logprobs


class StageScorer:
    """`stage` is this rank's part of the model, `wrapped` what runs it (with precision and DDP wrappers)."""

    def __init__(self, stage: GPTModel, wrapped: nn.Module, *, vocabulary: int, temperature: float):
        if not temperature > 0:
            raise ValueError(f"rollout.temperature must be above 0 in training, not {temperature}")
        self.wrapped = wrapped
        self._vocabulary = vocabulary
        self._temperature = temperature
        self._selected_N: Tensor | None = None
        # Sequence parallelism gives each rank as many columns.
        config = stage.config
        self._multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        if stage.post_process:
            head = stage.output_layer
            self._gather = bool(head.sequence_parallel)
            # The hook gathers the sequence, so that it can select. The head, told that its input is whole,
            # sums the input's gradient over the ranks; the gather's backward pass only splits it.
            head.sequence_parallel = False
            head.register_forward_pre_hook(self._select)

    def run(self, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """The stage's output: hidden states, or this rank's logits [1, N, V / tp] of the N masked tokens."""
        at_N = _predicted(mask_BT)
        rows, columns = tokens_BT.shape
        # The hidden state at t - 1 predicts token t. Megatron's hidden states are [T, B, H].
        self._selected_N = (at_N % columns - 1) * rows + at_N // columns
        inputs_BT = F.pad(tokens_BT[:, :-1], (0, -(columns - 1) % self._multiple))
        output: Tensor = self.wrapped(
            input_ids=inputs_BT.contiguous(), position_ids=None, attention_mask=None
        )
        self._selected_N = None
        return output

    def logprobs(
        self, logits_1NV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, *, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, float32 [B, T], 0 off the mask; on the last stage.

        Collective over the tensor-parallel ranks, each of which gets the same.
        """
        at_N = _predicted(mask_BT)
        logits_NV = logits_1NV[0].float()
        if self._temperature != 1.0:
            logits_NV = logits_NV / self._temperature
        group = parallel_state.get_tensor_model_parallel_group()
        logprobs_N, entropy_N = vocabulary_parallel_logprobs(
            logits_NV,
            tokens_BT.flatten()[at_N],
            first=logits_NV.shape[1] * group.rank(),
            vocabulary=self._vocabulary,
            group=group,
        )
        if not entropy_gradient:
            entropy_N = entropy_N.detach()
        zeros = logprobs_N.new_zeros(tokens_BT.numel())
        return (
            zeros.index_put((at_N,), logprobs_N).view_as(tokens_BT),
            zeros.index_put((at_N,), entropy_N).view_as(tokens_BT),
        )

    def _select(self, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_TBH = arguments[0]
        if self._gather:
            hidden_TBH = gather_from_sequence_parallel_region(hidden_TBH, tensor_parallel_output_grad=False)
        assert self._selected_N is not None
        selected_N1H = hidden_TBH.flatten(0, 1).index_select(0, self._selected_N)[:, None]
        return (selected_N1H, *arguments[1:])


def _predicted(mask_BT: Tensor) -> Tensor:
    """Flat indexes [N] of the sampled tokens that something predicts."""
    wanted_BT = mask_BT.clone()
    wanted_BT[:, 0] = False
    return torch.nonzero(wanted_BT.flatten()).squeeze(-1)
