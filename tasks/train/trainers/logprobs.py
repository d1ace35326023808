"""Log-probabilities of sampled tokens under a causal language model.

Only hidden states that predict a sampled token reach the language-model head, so logits are made for trained
tokens and for nothing else, and everything that a model does after its head (scales, soft caps) still holds.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tasks.train.losses import entropy
from tasks.train.trainers.packed_attention import PACKED


@dataclass(frozen=True, slots=True)
class Packed:
    """B sequences laid end to end for the model: `tasks.train.micro_batches.PackedRow` as tensors."""

    tokens_P: Tensor
    positions_P: Tensor
    starts_B: Tensor
    lengths: tuple[int, ...]


class TokenLogprobs:
    """Scores sequences with one model, at one sampling temperature (above 0)."""

    def __init__(self, model: PreTrainedModel, temperature: float):
        if not temperature > 0:
            raise ValueError(f"rollout.temperature must be above 0 in training, not {temperature}")
        self.model = model
        self._temperature = temperature
        self._selected_N: Tensor | None = None
        head = model.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(model).__name__} has no language-model head: change model.path")
        head.register_forward_pre_hook(self._select)

    def __call__(
        self,
        tokens_BT: Tensor,
        mask_BT: Tensor,
        *,
        packed: Packed | None = None,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each token given those before it, and the entropy of its distribution.

        Both are float32 [B, T], of the tempered distribution, and 0 off the mask. The entropy carries a
        gradient only on request. Padding is on the right, where causal attention never lets it be seen, so
        no attention mask is needed and environment tokens are attended to like any other. With `packed` the
        model reads the same sequences end to end instead, each attending to itself only.
        """
        wanted_BT = mask_BT.clone()
        wanted_BT[:, 0] = False  # nothing predicts the first token
        at_N = wanted_BT.flatten().nonzero().squeeze(-1)
        columns = tokens_BT.shape[1]
        row_N = at_N // columns
        # The hidden state at t - 1 predicts token t; the last token is never an input.
        if packed is None:
            self._selected_N = at_N - row_N - 1
            inputs: dict[str, Any] = {"input_ids": tokens_BT[:, :-1]}
        else:
            self._selected_N = packed.starts_B[row_N] + at_N % columns - 1
            inputs = {"input_ids": packed.tokens_P[None], "position_ids": packed.positions_P[None]}
            # Without this attention transformers sees from positions that restart where a sequence ends.
            if self.model.config._attn_implementation == PACKED:
                inputs["packed_lengths"] = packed.lengths
        logits_NV = self.model(**inputs, use_cache=False).logits[0]
        self._selected_N = None
        if self._temperature != 1.0:
            logits_NV = logits_NV.float() / self._temperature
        log_probabilities_NV = torch.log_softmax(logits_NV, -1, dtype=torch.float32)
        del logits_NV
        chosen_N = tokens_BT.flatten()[at_N]
        logprobs_N = log_probabilities_NV.gather(-1, chosen_N[:, None]).squeeze(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_N = entropy(log_probabilities_NV)
        zeros = logprobs_N.new_zeros(tokens_BT.numel())
        return (
            zeros.index_put((at_N,), logprobs_N).view_as(tokens_BT),
            zeros.index_put((at_N,), entropy_N).view_as(tokens_BT),
        )

    def _select(self, head: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._selected_N is None:
            return None
        hidden_BTH = arguments[0]
        return (hidden_BTH.flatten(0, 1).index_select(0, self._selected_N)[None], *arguments[1:])
