"""From event to event is the same as one iteration after the other."""

import heapq
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rollout.engines.modelled.limits import EngineLimits
from tasks.rollout.engines.modelled.schedule import ModelledSchedule
from tasks.rollout.engines.modelled.turns import Ended, Turn
from tasks.trajectory import StopReason
from tests.rollout.engines.modelled.reference import Linear, Outcome, PlainTurn, plainly

KV_TOKENS = 320


class Watched(ModelledSchedule):
    """Remembers whom it preempted, and knows the most blocks that were ever in use."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.preempted: list[str] = []
        self.peak = 0
        preempt = self._batch.preempt

        def remember(turn: Turn, keep: bool = True) -> int:
            if keep:
                self.preempted.append(turn.session)
            return preempt(turn, keep)

        self._batch.preempt = remember

    def check(self) -> None:
        cache = self._batch.cache
        assert 0 <= cache.available <= cache.blocks
        self.peak = max(self.peak, cache.blocks - cache.available)


def driven(
    events: list[tuple[float, str, Any]], limits: EngineLimits, kv_tokens: int
) -> tuple[Outcome, Watched]:
    """What the schedule does, called only when it asks to be or something happens."""
    schedule = Watched(limits, Linear(), kv_tokens)
    queue = [(at, index, kind, what) for index, (at, kind, what) in enumerate(events)]
    ended: list[Ended] = []
    version, updating = 0, False
    lengths: dict[str, int] = {}
    seen = 0
    while True:
        due = schedule.next_event()
        for end in ended[seen:]:
            lengths[end.turn.session] = end.turn.context + end.sampled
        seen = len(ended)
        if queue and (due is None or queue[0][0] <= due):
            at, _, kind, what = heapq.heappop(queue)
            if kind == "submit":
                turn = Turn(what.session, what.context, what.to_sample)
                turn.prompt_key, turn.prompt_tokens = what.key, what.prompt_tokens
                ended += schedule.submit(at, turn)
            elif kind == "again":
                before, more, to_sample = what
                context = lengths.pop(before.session, 0) + more
                if context > more and context + to_sample <= limits.max_context:
                    turn = Turn(before.session, context, to_sample)
                    turn.prompt_key, turn.prompt_tokens = before.key, before.prompt_tokens
                    ended += schedule.submit(at, turn)
            elif kind == "abort":
                ended += schedule.abort(at, [what], StopReason.CANCELLED)
            elif kind == "update" and not updating:
                updating = True
                frozen, new = schedule.suspend(at)
                ended += new
                heapq.heappush(queue, (frozen + what, -1, "updated", None))
            elif kind == "updated":
                ended += schedule.advance(at)
                version, updating = version + 1, False
                schedule.invalidate(version)
                ended += schedule.resume(at)
        elif due is not None:
            ended += schedule.advance(due, begin=True)
        else:
            break
        schedule.check()
    counters = schedule.counters(1e9)
    assert not schedule.running
    assert not schedule.waiting
    assert not schedule.recomputing
    ends = [
        (
            end.turn.session,
            end.at,
            end.sampled,
            end.stop.value,
            tuple(version for version, count in end.turn.versions for _ in range(count)),
        )
        for end in ended
    ]
    outcome = Outcome(ends, schedule.preempted, counters.recomputed_tokens, counters.steps, schedule.peak)
    return outcome, schedule


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[float, str, Any]], EngineLimits]:
    most = draw(st.integers(1, 6))
    limits = EngineLimits(
        max_running=most,
        max_batch_tokens=draw(st.integers(most, 90)),
        max_context=KV_TOKENS,
        block_tokens=draw(st.sampled_from((1, 4, 16))),
        prefix_cache=draw(st.booleans()),
        reserve_context=draw(st.booleans()),
    )
    events: list[tuple[float, str, Any]] = []
    prompts = {"a": draw(st.integers(1, 60)), "b": draw(st.integers(1, 60))}
    at = 0.0
    for index in range(draw(st.integers(1, 12))):
        at += draw(st.sampled_from((0.0, 0.0131, 0.2077, 3.1)))
        key = draw(st.sampled_from((None, "a", "b")))
        shared = prompts[key] if key else 0
        context = shared + draw(st.integers(1, 120))
        turn = PlainTurn(f"s{index}", context, draw(st.integers(0, 120)), key, shared)
        events.append((at, "submit", turn))
        if draw(st.integers(0, 4)) == 0:
            events.append((at + draw(st.floats(0.001, 4.0)), "abort", turn.session))
        if draw(st.booleans()):
            again = (turn, draw(st.integers(1, 40)), draw(st.integers(1, 40)))
            events.append((at + draw(st.floats(0.5, 8.0)), "again", again))
        if draw(st.integers(0, 5)) == 0:
            events.append((at + draw(st.floats(0.001, 4.0)), "update", draw(st.floats(0.01, 1.0))))
    events.sort(key=lambda event: event[0])
    return events, limits


def plain(events: list[tuple[float, str, Any]]) -> list[tuple[float, str, Any]]:
    return [
        (at, kind, PlainTurn(what.session, what.context, what.to_sample, what.key, what.prompt_tokens))
        if kind == "submit"
        else (at, kind, what)
        for at, kind, what in events
    ]


@given(histories())
@settings(max_examples=100, deadline=None)
def test_equals_one_iteration_after_the_other(
    history: tuple[list[tuple[float, str, Any]], EngineLimits],
) -> None:
    events, limits = history
    expected = plainly(plain(events), limits, KV_TOKENS)
    found, _ = driven(events, limits, KV_TOKENS)
    assert [end[0] for end in found.ends] == [end[0] for end in expected.ends]
    assert [end[2:] for end in found.ends] == [end[2:] for end in expected.ends]
    for end, other in zip(found.ends, expected.ends, strict=True):
        assert end[1] == pytest.approx(other[1], abs=1e-9)
    assert found.preempted == expected.preempted
    assert found.recomputed == expected.recomputed
    assert found.iterations == expected.iterations
    assert {end[0] for end in found.ends} == {what.session for _, kind, what in events if kind == "submit"}


def prefill_s(tokens: int, decodes: int = 0, context: int = 0) -> float:
    timing = Linear()
    fixed = timing.iteration + timing.decode * decodes + timing.context * context
    return fixed + timing.token * tokens + timing.attended * tokens * tokens / 2


def decode_s(decodes: int, context: int) -> float:
    timing = Linear()
    return timing.iteration + timing.decode * decodes + timing.context * context


def test_the_last_admitted_is_preempted_when_blocks_run_out() -> None:
    """Six blocks of four tokens, two turns that fill three each after four decodes: by hand."""
    limits = EngineLimits(2, 8, max_context=24, block_tokens=4, prefix_cache=False)
    schedule = ModelledSchedule(limits, Linear(), 24)
    for session in ("a", "b"):
        schedule.submit(0.0, Turn(session, 8, 10))
    ended: list[Ended] = []
    while (due := schedule.next_event()) is not None:
        ended += schedule.advance(due, begin=True)
    # "a" is prefilled alone (a budget of 8), "b" with a budget of 7 beside "a"'s first decode, which leaves
    # a token: "a" decodes with 8, 9 computed while "b" is prefilled, then both decode until "a", with 12
    # computed, needs a fourth block.
    at = prefill_s(8)
    timing = Linear()
    at += decode_s(1, 8) + timing.token * 7 + timing.attended * 7 * 3.5
    at += decode_s(1, 9) + timing.token * 1 + timing.attended * (7 + 0.5)
    at += decode_s(2, 10 + 8) + decode_s(2, 11 + 9)
    # "b" had computed 10 tokens and sampled 3. It waits until "a" is over, which had sampled 5.
    at += sum(decode_s(1, 12 + more) for more in range(5))
    assert (ended[0].turn.session, ended[0].sampled) == ("a", 10)
    assert ended[0].at == pytest.approx(at, abs=1e-9)
    # Of its 11 tokens, 8 and 3 are computed again, the latter sample its fourth.
    at += prefill_s(8) + timing.iteration + timing.token * 3 + timing.attended * 3 * (8 + 1.5)
    at += sum(decode_s(1, 11 + more) for more in range(6))
    assert (ended[1].turn.session, ended[1].sampled) == ("b", 10)
    assert ended[1].at == pytest.approx(at, abs=1e-9)
    counters = schedule.counters(1e9)
    assert (counters.preemptions, counters.prefill_tokens, counters.recomputed_tokens) == (1, 8 + 8 + 11, 0)


def test_decodes_take_as_many_calls_as_there_are_ends() -> None:
    """A thousand iterations, and nobody is woken but for what ended."""
    schedule = ModelledSchedule(EngineLimits(8, 512, 4096), Linear(), 65536)
    for index in range(8):
        schedule.submit(0.0, Turn(f"s{index}", 20, 200 + 100 * index))
    calls = 0
    while (due := schedule.next_event()) is not None:
        schedule.advance(due, begin=True)
        calls += 1
    assert schedule.counters(1e9).steps == 900
    assert calls <= 2 + 8


def test_what_vllm_would_refuse_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_batch_tokens \(4\) must be at least max_running \(8\)"):
        EngineLimits(8, 4, 100)
    with pytest.raises(ValueError, match="KV of 64 tokens, a context may have 100"):
        ModelledSchedule(EngineLimits(8, 8, 100), Linear(), 64)
    schedule = ModelledSchedule(EngineLimits(8, 8, 100), Linear(), 200)
    schedule.submit(0.0, Turn("s", 10, 10))
    with pytest.raises(ValueError, match="has a request already"):
        schedule.submit(0.0, Turn("s", 10, 10))
    with pytest.raises(ValueError, match="91 tokens and 10 to sample do not fit"):
        schedule.submit(0.0, Turn("t", 91, 10))
    with pytest.raises(ValueError, match="only while suspended"):
        schedule.invalidate(1)
