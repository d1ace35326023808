"""What an algorithm is: it makes sequences with advantages of trajectories, and a loss of log-probabilities.

The trainer knows no algorithm; it runs the model and calls `loss`.
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from tasks.train.losses import BatchCounts
from tasks.train.sequences import PreparedBatch
from tasks.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One micro-batch: B sequences padded to T tokens. Values off the mask are placeholders."""

    logprobs_BT: Tensor  # float32, of the current policy at the rollout temperature; differentiable
    entropy_BT: Tensor  # float32, nats; differentiable when the algorithm `differentiates_entropy`
    mask_BT: Tensor  # bool: the sampled tokens
    advantages_BT: Tensor
    behaviour_logprobs_BT: Tensor
    proximal_logprobs_BT: Tensor  # detached: of the policy before the batch's first optimiser step
    reference_logprobs_BT: Tensor | None  # detached; given when the algorithm `needs_reference`
    sequence_tokens_B: Tensor  # trained tokens of each row's whole trajectory
    counts: BatchCounts
    dp_size: int = 1


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The micro-batch's share of the loss, and its share of the metrics by name.

    `sums` are sums over the mask; the trainer divides them by the batch's trained tokens. Of `maxima` it
    takes the greatest.
    """

    loss: Tensor  # a scalar with a graph
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    @property
    def needs_reference(self) -> bool:
        """Whether `loss` reads the reference policy's log-probabilities."""

    @property
    def differentiates_entropy(self) -> bool:
        """Whether `loss` has a term in the entropy; otherwise it is computed without a graph, as a metric."""

    def prepare(self, trajectories: list[Trajectory]) -> PreparedBatch:
        """Pure numpy. Trajectories that share a key are segments of one trajectory."""

    def loss(self, inputs: LossInputs) -> LossTerms:
        """Shares of all micro-batches of an optimiser step sum to the step's loss."""
