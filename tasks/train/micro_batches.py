"""How a batch is cut: mini-batches for optimiser steps, micro-batches for memory, padding for rectangles.

Pure numpy. What is padding is known from lengths, never from a token id.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasks.train.sequences import TrainingSequence

PASS_OVERHEAD_TOKENS = 64
"""What one more forward and backward pass costs beyond its tokens, in tokens' worth of time."""


class SequenceTooLong(ValueError):
    """A sequence that does not fit a micro-batch by itself. The message names the option to change."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B sequences padded on the right to T tokens. Arrays are [B, T] unless said otherwise."""

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    advantages: NDArray[np.float32]
    behaviour_logprobs: NDArray[np.float32]
    sequence_tokens: NDArray[np.int64]  # [B]: trained tokens of the row's whole trajectory


def split_mini_batches(groups: Sequence[int], parts: int) -> list[list[int]]:
    """Cut sequences, given by their groups, into `parts` lists of indexes that never split a group.

    Groups keep their order and are spread evenly by number; fewer groups than parts make fewer parts.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    ordered = list(members.values())
    chunks = np.array_split(np.arange(len(ordered)), parts)
    return [[index for group in chunk for index in ordered[group]] for chunk in chunks if chunk.size]


def cut_micro_batches(
    lengths: Sequence[int], max_tokens: int, overhead_tokens: int = PASS_OVERHEAD_TOKENS
) -> list[list[int]]:
    """Cut sequences, given by their lengths, into lists of indexes of similar lengths.

    Rows x longest is at most `max_tokens` in each. Among all cuts of the sequences sorted by length, this one
    has the least sum of padded tokens and `overhead_tokens` a micro-batch. Raises `SequenceTooLong`.
    """
    order = np.argsort(np.asarray(lengths, dtype=np.int64), kind="stable")
    ordered = np.asarray(lengths, dtype=np.int64)[order]
    if ordered.size and ordered[-1] > max_tokens:
        raise SequenceTooLong(
            f"a sequence of {ordered[-1]} tokens does not fit train.trainer.micro_batch_tokens "
            f"({max_tokens}): raise it, or lower the domain's max_tokens"
        )
    # cost[j]: of the best cut of the first j; start[j]: where its last micro-batch begins.
    cost = np.zeros(ordered.size + 1)
    start = np.zeros(ordered.size + 1, dtype=np.int64)
    for end in range(1, ordered.size + 1):
        longest = max(int(ordered[end - 1]), 1)
        first = max(0, end - max_tokens // longest)
        candidates = cost[first:end] + longest * (end - np.arange(first, end)) + overhead_tokens
        best = int(candidates.argmin())
        cost[end], start[end] = candidates[best], first + best
    cuts: list[list[int]] = []
    end = ordered.size
    while end:
        cuts.append(order[start[end] : end].tolist())
        end = int(start[end])
    return cuts[::-1]


def pad_micro_batch(sequences: Sequence[TrainingSequence], sequence_tokens: Sequence[int]) -> MicroBatch:
    """Pad sequences on the right; `sequence_tokens` are the trained tokens of each one's trajectory."""
    shape = (len(sequences), max(len(sequence.tokens) for sequence in sequences))
    batch = MicroBatch(
        tokens=np.zeros(shape, np.int64),
        loss_mask=np.zeros(shape, np.bool_),
        advantages=np.zeros(shape, np.float32),
        behaviour_logprobs=np.zeros(shape, np.float32),
        sequence_tokens=np.asarray(sequence_tokens, np.int64),
    )
    for row, sequence in enumerate(sequences):
        end = len(sequence.tokens)
        batch.tokens[row, :end] = sequence.tokens
        batch.loss_mask[row, :end] = sequence.loss_mask
        batch.advantages[row, :end] = sequence.advantages
        batch.behaviour_logprobs[row, :end] = sequence.behaviour_logprobs
    return batch


def trained_tokens(sequences: Sequence[TrainingSequence]) -> dict[int, int]:
    """Trained tokens of each trajectory that has any, over all the sequences it is trained as."""
    counts: dict[int, int] = {}
    for sequence in sequences:
        tokens = int(sequence.loss_mask.sum())
        if tokens:
            counts[sequence.trajectory] = counts.get(sequence.trajectory, 0) + tokens
    return counts
