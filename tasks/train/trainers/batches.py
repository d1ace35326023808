"""The batch of a train step as tensors: this rank's micro-batches of each optimiser step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.train.algorithms.base import LossInputs
from tasks.train.losses import BatchCounts
from tasks.train.micro_batches import (
    cut_micro_batches,
    cut_packed,
    deal,
    pack_inputs,
    pad_micro_batch,
    split_mini_batches,
    trained_tokens,
)
from tasks.train.sequences import TrainingSequence
from tasks.train.trainers.logprobs import Packed


@dataclass(slots=True)
class MicroBatchTensors:
    """One forward and backward pass. Losses are computed on [B, T] whether or not the model reads packed."""

    tokens_BT: Tensor
    mask_BT: Tensor
    advantages_BT: Tensor
    behaviour_logprobs_BT: Tensor
    sequence_tokens_B: Tensor
    packed: Packed | None = None
    read_tokens: int = 0  # what the pass costs: padding included; 0 for one that only keeps step with others
    proximal_logprobs_BT: Tensor | None = None  # None: those of the pass itself, detached

    def loss_inputs(
        self, logprobs_BT: Tensor, entropy_BT: Tensor, reference_BT: Tensor | None, counts: BatchCounts
    ) -> LossInputs:
        """What the algorithm's loss is given after a pass; `counts` are of the whole optimiser step."""
        proximal_BT = self.proximal_logprobs_BT
        return LossInputs(
            logprobs_BT=logprobs_BT,
            entropy_BT=entropy_BT,
            mask_BT=self.mask_BT,
            advantages_BT=self.advantages_BT,
            behaviour_logprobs_BT=self.behaviour_logprobs_BT,
            proximal_logprobs_BT=logprobs_BT.detach() if proximal_BT is None else proximal_BT,
            reference_logprobs_BT=reference_BT,
            sequence_tokens_B=self.sequence_tokens_B,
            counts=counts,
        )


@dataclass(slots=True)
class MiniBatchTensors:
    """One optimiser step: this rank's micro-batches, as many on every rank, and the counts of all ranks."""

    micro_batches: list[MicroBatchTensors]
    counts: BatchCounts


@dataclass(frozen=True, slots=True)
class BatchCutter:
    """Cuts batches for one of `ranks` data-parallel ranks. Every rank cuts the same batch, so none asks."""

    max_tokens: int
    packing: bool
    device: torch.device
    rank: int = 0
    ranks: int = 1

    def mini_batches(self, sequences: Sequence[TrainingSequence], parts: int) -> list[MiniBatchTensors]:
        """Raises `SequenceTooLong`."""
        split = split_mini_batches([sequence.group for sequence in sequences], parts)
        return [self._mini_batch([sequences[index] for index in part]) for part in split]

    def _mini_batch(self, sequences: list[TrainingSequence]) -> MiniBatchTensors:
        tokens = trained_tokens(sequences)
        hands = deal([len(sequence.tokens) for sequence in sequences], self.ranks)
        cut = cut_packed if self.packing else cut_micro_batches
        cuts = [cut([len(sequences[index].tokens) for index in hand], self.max_tokens) for hand in hands]
        hand = [sequences[index] for index in hands[self.rank]]
        micro_batches = [
            self._micro_batch(
                [hand[index] for index in members],
                [tokens.get(hand[index].trajectory, 0) for index in members],
            )
            for members in cuts[self.rank]
        ]
        # Gathering parameters is collective, so every rank makes as many passes as the busiest.
        passes = max(len(others) for others in cuts)
        micro_batches += [self._idle() for _ in range(passes - len(micro_batches))]
        return MiniBatchTensors(micro_batches, BatchCounts(sum(tokens.values()), len(tokens)))

    def _micro_batch(self, rows: list[TrainingSequence], sequence_tokens: list[int]) -> MicroBatchTensors:
        padded = pad_micro_batch(rows, sequence_tokens)
        packed = None
        read_tokens = padded.tokens.size
        if self.packing:
            row = pack_inputs(rows)
            read_tokens = sum(len(sequence.tokens) for sequence in rows)
            packed = Packed(
                torch.from_numpy(row.tokens).to(self.device),
                torch.from_numpy(row.positions).to(self.device),
                torch.from_numpy(row.starts).to(self.device),
                row.lengths,
            )
        return MicroBatchTensors(
            tokens_BT=torch.from_numpy(padded.tokens).to(self.device),
            mask_BT=torch.from_numpy(padded.loss_mask).to(self.device),
            advantages_BT=torch.from_numpy(padded.advantages).to(self.device),
            behaviour_logprobs_BT=torch.from_numpy(padded.behaviour_logprobs).to(self.device),
            sequence_tokens_B=torch.from_numpy(padded.sequence_tokens).to(self.device),
            packed=packed,
            read_tokens=read_tokens,
        )

    def _idle(self) -> MicroBatchTensors:
        """A pass over one token that trains nothing: loss 0, with a graph through every parameter."""
        zeros = torch.zeros(1, 2, device=self.device)
        return MicroBatchTensors(
            zeros.long(), zeros.bool(), zeros, zeros, torch.zeros(1, dtype=torch.long, device=self.device)
        )
