"""Every reward ends exactly once, whatever activations do."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.reward.config import ServerlessConfig
from tasks.reward.mailbox import Report, Work
from tasks.reward.reward_queue import GiveUp, RewardQueue, Send, Start

pytest.importorskip("lithops")  # without it no campaign can name a back end


def queue_of(**options: Any) -> RewardQueue:
    settings = {"backend": "localhost", "linger_s": 0.0, "retry_pause_s": 1.0, **options}
    return RewardQueue(ServerlessConfig(**settings), (f"a{number}" for number in itertools.count()))


def work(key: str, limit_s: float = 10.0) -> Work:
    return Work(key, "f", [], limit_s)


def results(*keys: str) -> Report:
    return Report("results", [(key, ["reward", 1.0]) for key in keys])


def keys(action: Any) -> list[str]:
    return [item.key for item in action.work]


def test_what_waits_travels_in_batches():
    queue = queue_of(batch_size=3, activations=2, linger_s=1.0)
    for key in "abcdefg":
        queue.ask(work(key), 0, 0.0)
    first, second = queue.plan(0.0)
    assert isinstance(first, Start)
    assert isinstance(second, Start)
    assert keys(first) == ["a", "b", "c"]
    assert keys(second) == ["d", "e", "f"]
    assert queue.plan(0.5) == []  # one alone waits for company
    (third,) = queue.plan(1.0)
    assert isinstance(third, Send)
    assert keys(third) == ["g"]


def test_an_idle_activation_is_used_before_a_new_one_is_started():
    queue = queue_of(activations=5)
    queue.ask(work("a"), 0, 0.0)
    (start,) = queue.plan(0.0)
    assert queue.heard(start.activation, Report("started"), 1.0) == []
    assert queue.heard(start.activation, results("a"), 1.1) == ["a"]
    queue.ask(work("b"), 0, 2.0)
    (send,) = queue.plan(2.0)
    assert isinstance(send, Send)
    assert send.activation == start.activation
    assert queue.counts.cold_starts == 1
    assert queue.counts.cold_start_seconds == 1.0


@pytest.mark.parametrize(("option", "at"), [({"idle_s": 10.0}, 8.5), ({"life_s": 5.0}, 5.1)])
def test_one_that_may_be_about_to_end_is_sent_nothing(option, at):
    queue = queue_of(**option)
    queue.ask(work("a"), 0, 0.0)
    (start,) = queue.plan(0.0)
    queue.heard(start.activation, Report("started"), 1.0)
    queue.heard(start.activation, results("a"), 1.0)
    queue.ask(work("b"), 0, at)
    assert isinstance(queue.plan(at)[0], Start)


def test_activations_that_do_not_stay_get_one_batch_each():
    queue = queue_of(idle_s=0, activations=1)
    assert queue.warm_up(0.0) == []
    queue.ask(work("a"), 0, 0.0)
    (start,) = queue.plan(0.0)
    queue.ask(work("b"), 0, 0.1)
    assert queue.plan(0.1) == []
    queue.heard(start.activation, results("a"), 0.2)
    queue.heard(start.activation, Report("ended", seconds=0.2), 0.2)
    assert isinstance(queue.plan(0.2)[0], Start)
    assert queue.counts.activation_seconds == 0.2


def test_a_lost_activation_is_tried_again_after_pauses_that_grow_and_then_given_up():
    queue = queue_of(idle_s=0)
    queue.ask(work("a"), 2, 0.0)
    time = 0.0
    for pause in (1.0, 2.0):
        (start,) = queue.plan(time)
        queue.lost(start.activation, "it fell over", time)
        assert queue.plan(time + 0.9 * pause) == []
        time += pause
    (start,) = queue.plan(time)
    queue.heard(start.activation, Report("failed", text="it fell over again"), time)
    (end,) = queue.plan(time)
    assert end == GiveUp("a", "it fell over again, after 3 tries")
    assert queue.open == 0
    assert (queue.counts.lost, queue.counts.retries, queue.counts.given_up) == (3, 2, 1)


@pytest.mark.parametrize(
    ("reports", "at", "option"),
    [
        ([], 121.0, "start_limit_s"),
        ([Report("started")], 22.0, "silence_limit_s"),
        ([Report("started"), *[Report("alive")] * 200], 201.0, "answers nothing"),
    ],
)
def test_silence_in_any_form_is_a_loss(reports, at, option):
    queue = queue_of(retry_pause_s=0.0)
    queue.ask(work("a"), 0, 0.0)
    (start,) = queue.plan(0.0)
    for second, report in enumerate(reports, 1):
        queue.heard(start.activation, report, float(second))
        if second < 150:
            assert queue.plan(float(second)) == []
    (end,) = queue.plan(at)
    assert isinstance(end, GiveUp)
    assert option in end.reason


def test_the_first_outcome_counts_and_a_late_one_is_dropped():
    queue = queue_of(retry_pause_s=0.0)
    queue.ask(work("a"), 1, 0.0)
    (first,) = queue.plan(0.0)
    queue.lost(first.activation, "lost, as it seemed", 1.0)
    (second,) = queue.plan(1.0)
    assert queue.heard(first.activation, results("a"), 2.0) == ["a"]
    assert queue.heard(second.activation, results("a"), 2.1) == []
    assert queue.counts.duplicates == 1
    assert queue.open == 0


def test_an_outcome_that_comes_while_its_reward_waits_again_ends_it():
    queue = queue_of()
    queue.ask(work("a"), 1, 0.0)
    (first,) = queue.plan(0.0)
    queue.lost(first.activation, "lost, as it seemed", 0.0)
    assert queue.heard(first.activation, results("a"), 0.5) == ["a"]
    assert queue.plan(5.0) == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "answer", "lose", "end", "late", "wait"]), st.integers(0, 3)),
        max_size=80,
    )
)
@settings(deadline=None)
def test_every_reward_ends_exactly_once(events):
    """Whatever happens, and once everything that was started has been lost, nothing is left open."""
    queue = queue_of(batch_size=2, activations=2, linger_s=0.5)
    time, asked, ended = 0.0, 0, []
    sent: dict[str, list[str]] = {}

    def perform() -> None:
        for action in queue.plan(time):
            if isinstance(action, GiveUp):
                ended.append(action.key)
            else:
                sent.setdefault(action.activation, []).extend(keys(action))

    for kind, number in events:
        time += 0.3
        living = queue.activations
        name = living[number % len(living)] if living else None
        if kind == "ask":
            queue.ask(work(f"k{asked}"), number, time)
            asked += 1
        elif kind == "late" and sent:
            name = sorted(sent)[number % len(sent)]
            ended += queue.heard(name, results(*sent[name]), time)
        elif name is not None and kind == "answer":
            ended += queue.heard(name, results(*sent.get(name, [])[: number + 1]), time)
        elif name is not None and kind == "lose":
            queue.lost(name, "lost", time)
        elif name is not None and kind == "end":
            queue.heard(name, Report("ended"), time)
        perform()
        assert len(ended) == len(set(ended))
        assert len(ended) + queue.open == asked
        assert len(queue.activations) <= 2
    for _ in range(4 * (asked + 1)):
        time += 60.0
        perform()
        for name in queue.activations:
            queue.lost(name, "lost", time)
    assert queue.open == 0
    assert sorted(ended) == sorted(f"k{number}" for number in range(asked))


def test_function_seconds_are_those_of_every_activation_until_its_end_or_now():
    queue = queue_of(batch_size=1, activations=2)
    queue.ask(work("k0"), 0, 0.0)
    queue.ask(work("k1"), 0, 0.0)
    queue.plan(1.0)
    assert queue.counts.concurrency_peak == len(queue.activations) == 2
    assert queue.function_seconds(3.0) == pytest.approx(4.0)
    queue.lost(queue.activations[0], "gone", 4.0)
    assert queue.function_seconds(6.0) == pytest.approx(3.0 + 5.0)
    assert queue.counts.concurrency_peak == 2
