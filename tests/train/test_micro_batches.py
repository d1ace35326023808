import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.train.micro_batches import (
    SequenceTooLong,
    cut_micro_batches,
    cut_packed,
    deal,
    pack_inputs,
    pad_micro_batch,
    split_mini_batches,
    trained_tokens,
)
from tasks.train.sequences import TrainingSequence


def _sequence(trajectory: int, tokens: list[int], mask: list[int]) -> TrainingSequence:
    return TrainingSequence(
        trajectory=trajectory,
        group=0,
        tokens=np.array(tokens, np.int32),
        loss_mask=np.array(mask, np.bool_),
        advantages=np.array(mask, np.float32) * 2,
        behaviour_logprobs=-np.array(mask, np.float32),
    )


@given(
    lengths=st.lists(st.integers(1, 64), max_size=60),
    limit=st.integers(64, 512),
    overhead=st.integers(0, 300),
)
def test_every_sequence_is_in_one_micro_batch_within_the_limit(
    lengths: list[int], limit: int, overhead: int
) -> None:
    cuts = cut_micro_batches(lengths, limit, overhead)
    assert sorted(index for cut in cuts for index in cut) == list(range(len(lengths)))
    assert all(len(cut) * max(lengths[index] for index in cut) <= limit for cut in cuts)


def _cost(lengths: list[int], cuts: list[list[int]], overhead: int) -> int:
    return sum(len(cut) * max(lengths[index] for index in cut) + overhead for cut in cuts)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    limit=st.integers(40, 120),
    overhead=st.integers(0, 50),
)
def test_no_other_cut_of_the_sorted_sequences_costs_less(
    lengths: list[int], limit: int, overhead: int
) -> None:
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best = min(
        _cost(lengths, cuts, overhead)
        for ends in range(2 ** (len(lengths) - 1))
        if (cuts := _cuts_at(order, ends))
        and all(len(cut) * max(lengths[index] for index in cut) <= limit for cut in cuts)
    )
    assert _cost(lengths, cut_micro_batches(lengths, limit, overhead), overhead) == best


def _cuts_at(order: list[int], ends: int) -> list[list[int]]:
    cuts: list[list[int]] = [[]]
    for position, index in enumerate(order):
        cuts[-1].append(index)
        if ends >> position & 1:
            cuts.append([])
    return cuts


def test_similar_lengths_go_together() -> None:
    assert cut_micro_batches([10, 100, 11, 99], 1000, overhead_tokens=5) == [[0, 2], [3, 1]]


def test_a_costly_pass_makes_fewer_micro_batches() -> None:
    assert cut_micro_batches([10, 100, 11, 99], 1000, overhead_tokens=500) == [[0, 2, 3, 1]]


def test_a_sequence_above_the_limit_names_the_option() -> None:
    with pytest.raises(SequenceTooLong, match=r"train\.trainer\.micro_batch_tokens"):
        cut_micro_batches([3, 65], 64)


@given(groups=st.lists(st.integers(0, 9), max_size=40), parts=st.integers(1, 6))
def test_mini_batches_never_split_a_group(groups: list[int], parts: int) -> None:
    minis = split_mini_batches(groups, parts)
    assert sorted(index for mini in minis for index in mini) == list(range(len(groups)))
    assert len(minis) == min(parts, len(set(groups)))
    for group in set(groups):
        assert sum(any(groups[index] == group for index in mini) for mini in minis) == 1


def test_padding_comes_from_lengths_and_never_from_a_token_id() -> None:
    # Token 0, which fills the padding, is also a sampled token here.
    batch = pad_micro_batch([_sequence(0, [5, 0, 0], [0, 1, 1]), _sequence(1, [7, 0], [0, 1])], [2, 1])
    assert batch.tokens.tolist() == [[5, 0, 0], [7, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, True, True], [False, True, False]]
    assert batch.advantages.tolist() == [[0, 2, 2], [0, 2, 0]]
    assert batch.behaviour_logprobs.tolist() == [[0, -1, -1], [0, -1, 0]]
    assert batch.sequence_tokens.tolist() == [2, 1]


def test_segments_count_as_one_trajectory_and_untrained_ones_not_at_all() -> None:
    sequences = [
        _sequence(0, [1, 2, 3], [0, 1, 1]),
        _sequence(1, [1, 2], [0, 0]),
        _sequence(0, [4, 5], [0, 1]),
    ]
    assert trained_tokens(sequences) == {0: 3}


@given(lengths=st.lists(st.integers(1, 64), max_size=60), limit=st.integers(64, 300))
def test_packed_cuts_hold_every_sequence_once_within_the_budget(lengths: list[int], limit: int) -> None:
    cuts = cut_packed(lengths, limit)
    assert sorted(index for cut in cuts for index in cut) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in cut) for cut in cuts]
    assert all(tokens <= limit for tokens in sums)
    # First fit leaves no two rows that would fit into one.
    assert all(left + right > limit for at, left in enumerate(sums) for right in sums[at + 1 :])


def test_a_sequence_above_the_packed_budget_names_the_option() -> None:
    with pytest.raises(SequenceTooLong, match=r"train\.trainer\.micro_batch_tokens"):
        cut_packed([4, 65], 64)


def test_packed_inputs_are_all_but_each_last_token_with_positions_that_restart() -> None:
    row = pack_inputs([_sequence(0, [5, 6, 7], [0, 1, 1]), _sequence(1, [8, 9], [0, 1])])
    assert row.tokens.tolist() == [5, 6, 8]
    assert row.positions.tolist() == [0, 1, 0]
    assert row.starts.tolist() == [0, 2]
    assert row.lengths == (2, 1)


@given(lengths=st.lists(st.integers(1, 64), max_size=60), ranks=st.integers(1, 8))
def test_ranks_get_every_sequence_once_in_numbers_and_tokens_that_are_close(
    lengths: list[int], ranks: int
) -> None:
    hands = deal(lengths, ranks)
    assert sorted(index for hand in hands for index in hand) == list(range(len(lengths)))
    numbers = [len(hand) for hand in hands]
    tokens = [sum(lengths[index] for index in hand) for hand in hands]
    assert max(numbers) - min(numbers) <= 1
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


def test_one_rank_gets_the_sequences_in_their_order() -> None:
    assert deal([3, 9, 1], 1) == [[0, 1, 2]]
