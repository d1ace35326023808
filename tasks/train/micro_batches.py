"""How a batch is cut: mini-batches for optimiser steps, ranks, micro-batches for memory, padding or packing.

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


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The inputs of B sequences laid end to end, P tokens: of each all but its last token."""

    tokens: NDArray[np.int64]  # [P]
    positions: NDArray[np.int64]  # [P]: restart at 0 with each sequence
    starts: NDArray[np.int64]  # [B]: where each sequence begins
    lengths: tuple[int, ...]  # of each


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
    if ordered.size:
        _require_fit(int(ordered[-1]), max_tokens)
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


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Share sequences, given by their lengths, out to `ranks` lists of indexes with about equal tokens.

    Longest first, back and forth over the ranks, so that their numbers differ by one at most. One rank gets
    them in their order.
    """
    if ranks == 1:
        return [list(range(len(lengths)))]
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        dealt = order[start : start + ranks]
        turn = range(ranks) if (start // ranks) % 2 == 0 else range(ranks - 1, -1, -1)
        for rank, index in zip(turn, dealt, strict=False):
            hands[rank].append(index)
    return hands


def cut_packed(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut sequences, given by their lengths, into lists of indexes with at most `max_tokens` tokens each.

    First fit, longest first. Raises `SequenceTooLong`.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    cuts: list[list[int]] = []
    room: list[int] = []
    for index in order:
        length = lengths[index]
        _require_fit(length, max_tokens)
        at = next((at for at, left in enumerate(room) if left >= length), None)
        if at is None:
            cuts.append([index])
            room.append(max_tokens - length)
        else:
            cuts[at].append(index)
            room[at] -= length
    return cuts


def pack_inputs(sequences: Sequence[TrainingSequence]) -> PackedRow:
    """What a model reads of these sequences, end to end. The last token of each is never an input."""
    inputs = [sequence.tokens[:-1] for sequence in sequences]
    lengths = [len(tokens) for tokens in inputs]
    return PackedRow(
        tokens=np.concatenate(inputs).astype(np.int64),
        positions=np.concatenate([np.arange(length) for length in lengths]).astype(np.int64),
        starts=np.cumsum([0, *lengths[:-1]]).astype(np.int64),
        lengths=tuple(lengths),
    )


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


def _require_fit(length: int, max_tokens: int) -> None:
    if length > max_tokens:
        raise SequenceTooLong(
            f"a sequence of {length} tokens does not fit train.trainer.micro_batch_tokens "
            f"({max_tokens}): raise it, or lower the domain's max_tokens"
        )
