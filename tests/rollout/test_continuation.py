import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasks.rollout.continuation import PartialTurn

CONTEXT = np.array([5, 6, 7], "<i4").tobytes()


def turn(max_new_tokens: int = 10) -> PartialTurn:
    return PartialTurn("t", CONTEXT, max_new_tokens, 0.7, 42)


def wire(first: int, count: int) -> tuple[bytes, bytes, bytes]:
    """Tokens first, first + 1, ..., their log-probabilities -first, ..., and versions 100 + first, ..."""
    numbers = np.arange(first, first + count)
    return (
        numbers.astype("<i4").tobytes(),
        (-numbers).astype("<f4").tobytes(),
        (100 + numbers).astype("<i4").tobytes(),
    )


def answer(first: int, count: int) -> dict[str, object]:
    tokens, logprobs, versions = wire(first, count)
    return {"tokens": tokens, "logprobs": logprobs, "versions": versions, "stop": "length"}


def ints(data: object) -> list[int]:
    assert isinstance(data, bytes)
    return np.frombuffer(data, "<i4").tolist()


def test_an_undisturbed_turn_is_asked_for_whole_and_answered_as_it_is() -> None:
    partial = turn()
    assert partial.ask("a") == {
        "session": "t",
        "tokens": CONTEXT,
        "max_new_tokens": 10,
        "temperature": 0.7,
        "seed": 42,
    }
    partial.take("a", 0, *wire(0, 4))
    assert partial.joined(answer(0, 10)) == answer(0, 10)


def test_the_next_worker_goes_on_after_what_was_kept_and_the_answers_join_with_their_stamps() -> None:
    partial = turn()
    partial.ask("a")
    partial.take("a", 0, *wire(0, 3))
    partial.take("a", 3, *wire(3, 1))
    request = partial.ask("b")
    assert ints(request["tokens"]) == [5, 6, 7, 0, 1, 2, 3]
    assert (request["max_new_tokens"], request["sampled_before"], request["seed"]) == (6, 4, 42)
    partial.take("b", 0, *wire(4, 2))
    request = partial.ask("c")
    assert ints(request["tokens"]) == [5, 6, 7, 0, 1, 2, 3, 4, 5]
    assert (request["max_new_tokens"], request["sampled_before"]) == (4, 6)
    partial.take("c", 0, *wire(6, 1))  # also in the answer, which counts
    assert partial.joined(answer(6, 4)) == answer(0, 10)


def test_what_leaves_a_gap_repeats_or_comes_from_a_worker_left_is_not_taken() -> None:
    partial = turn()
    partial.ask("a")
    partial.take("a", 1, *wire(1, 2))
    partial.take("b", 0, *wire(0, 2))
    assert partial.kept == 0
    partial.take("a", 0, *wire(0, 2))
    partial.take("a", 0, *wire(0, 2))
    assert partial.kept == 2
    partial.ask("b")
    partial.take("a", 2, *wire(2, 2))
    partial.take("a", 0, *wire(0, 2))
    assert partial.kept == 2


def test_a_token_is_always_left_to_sample_and_arrays_of_unequal_length_are_not_taken() -> None:
    partial = turn(4)
    partial.ask("a")
    partial.take("a", 0, *wire(0, 4))
    assert partial.kept == 0
    tokens, logprobs, versions = wire(0, 2)
    partial.take("a", 0, tokens, logprobs[:4], versions)
    assert partial.kept == 0
    partial.take("a", 0, *wire(0, 3))
    assert partial.ask("b")["max_new_tokens"] == 1


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=12), st.integers(1, 40))
def test_however_often_workers_are_lost_the_whole_is_that_of_one_worker(
    events: list[tuple[int, bool]], length: int
) -> None:
    """Each event: the present worker samples and reports so many tokens, and is lost thereafter or not."""
    partial, worker = turn(length), 0
    request, sampled = partial.ask(worker), 0
    for count, is_lost in events:
        kept_before = length - int(request["max_new_tokens"])
        if kept_before + sampled + count < length:
            partial.take(worker, sampled, *wire(kept_before + sampled, count))
            sampled += count
        if is_lost:
            worker += 1
            request, sampled = partial.ask(worker), 0
            assert ints(request["tokens"]) == [5, 6, 7, *range(partial.kept)]
            assert request.get("sampled_before", 0) == partial.kept
    left = int(request["max_new_tokens"])
    assert left >= 1
    assert partial.joined(answer(length - left, left)) == answer(0, length)
