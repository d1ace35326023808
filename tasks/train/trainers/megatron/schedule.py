"""Forward and backward passes of the micro-batches through Megatron's own schedule (1F1B over a pipeline)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from tasks.train.algorithms.base import Algorithm, LossTerms
from tasks.train.process_group import gather_json
from tasks.train.trainers.batches import MicroBatchTensors, MiniBatchTensors
from tasks.train.trainers.megatron.scoring import StageScorer


def sum_gradients(models: list[nn.Module], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Megatron's own reduction of gradients; the denominators are in the losses already."""
    finalize_model_grads(models, None, **options)


@torch.no_grad()
def score(scorer: StageScorer, batches: list[MicroBatchTensors]) -> list[Tensor]:
    """Log-probabilities float32 [B, T] of each pass, on the last stage; an empty list on the others."""

    def collect(batch: MicroBatchTensors, _: None, output: Tensor, non_loss_data: bool) -> Tensor:
        return scorer.logprobs(output, batch.tokens_BT, batch.mask_BT, entropy_gradient=False)[0]

    return _run(scorer, batches, [None] * len(batches), collect, forward_only=True)


def accumulate(
    scorer: StageScorer, step: MiniBatchTensors, references: list[Tensor], algorithm: Algorithm
) -> tuple[LossTerms, int]:
    """Forward, loss and backward of all passes of one optimiser step.

    `references` are the reference policy's log-probabilities of each pass, on the last stage and where the
    algorithm needs them. Gradients are in the parameters' `main_grad`, summed over all ranks. Returns the
    loss and the metrics of the whole step, and its padded tokens, the same on every rank.
    """

    def loss(
        batch: MicroBatchTensors, reference_BT: Tensor | None, output: Tensor
    ) -> tuple[Tensor, Tensor, LossTerms]:
        logprobs_BT, entropy_BT = scorer.logprobs(
            output, batch.tokens_BT, batch.mask_BT, entropy_gradient=algorithm.differentiates_entropy
        )
        terms = algorithm.loss(batch.loss_inputs(logprobs_BT, entropy_BT, reference_BT, step.counts))
        # Megatron divides by a count of tokens that it is given; `sum_gradients` gives it none.
        no_tokens = torch.zeros((), dtype=torch.int, device=output.device)
        return terms.loss, no_tokens, replace(terms, loss=terms.loss.detach())

    batches = step.micro_batches
    passes = _run(scorer, batches, references or [None] * len(batches), loss, forward_only=False)
    return _total(passes, sum(batch.read_tokens for batch in batches))


def _run(
    scorer: StageScorer,
    batches: list[MicroBatchTensors],
    references: list[Tensor] | list[None],
    finish: Callable[..., Any],
    *,
    forward_only: bool,
) -> list[Any]:
    Passes = Iterator[tuple[MicroBatchTensors, Tensor | None]]

    def forward(passes: Passes, _: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch, reference_BT = next(passes)
        return scorer.run(batch.tokens_BT, batch.mask_BT), partial(finish, batch, reference_BT)

    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=zip(batches, references, strict=True),
        model=[scorer.wrapped],
        num_microbatches=len(batches),
        # Sizes vary and travel with each tensor; these only have to be there.
        seq_length=batches[0].tokens_BT.shape[1],
        micro_batch_size=batches[0].tokens_BT.shape[0],
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results


def _total(passes: list[LossTerms], padded_tokens: int) -> tuple[LossTerms, int]:
    """Sums and maxima over the passes of all data-parallel ranks, from the last stages to every rank."""
    mine: dict[str, Any] | None = None
    if passes and parallel_state.get_tensor_model_parallel_rank() == 0:
        mine = {
            "padded_tokens": padded_tokens,
            "loss": sum(float(terms.loss) for terms in passes),
            "sums": {name: sum(float(terms.sums[name]) for terms in passes) for name in passes[0].sums},
            "maxima": {name: max(float(terms.maxima[name]) for terms in passes) for name in passes[0].maxima},
        }
    shares = [share for share in gather_json(mine) if share is not None]

    def over_ranks(reduce: Callable[[list[float]], float], kind: str) -> dict[str, Tensor]:
        names = shares[0][kind]
        return {name: _scalar(reduce([share[kind][name] for share in shares])) for name in names}

    return (
        LossTerms(
            _scalar(sum(share["loss"] for share in shares)),
            over_ranks(sum, "sums"),
            over_ranks(max, "maxima"),
        ),
        sum(share["padded_tokens"] for share in shares),
    )


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
