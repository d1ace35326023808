"""The schedule drives a model whose KV cache is transparent: the KV of a token is a fingerprint of all tokens
up to it and of the weights. Whatever reads a wrong, stale or foreign entry is caught where it reads.
"""

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from tasks.rollout.engines.batch_schedule import BatchSchedule, Finished, Iteration, Request
from tasks.trajectory import StopReason

STOP = 0
VOCABULARY = 7
CONTEXT = 24


def fingerprint(tokens: NDArray[np.int32], version: int) -> int:
    """Positive, within an int64. A CRC that starts from the version would mix it with the first token."""
    return (xxhash.xxh3_64_intdigest(tokens.astype("<i4").tobytes(), seed=version) >> 2) + 1


def next_token(tokens: NDArray[np.int32], version: int) -> int:
    return fingerprint(tokens, version) % VOCABULARY


class TransparentModel:
    """Computes iterations, checks that what is cached is right, and counts what is computed."""

    def __init__(self, slots: int) -> None:
        self.kv = np.zeros((slots, CONTEXT), np.int64)
        self.owner: list[str | None] = [None] * slots
        self.fresh: set[int] = set()  # slots whose request has not computed anything yet
        self.offered: dict[Request, int] = {}  # version of the KV that came with a request
        self.version = 0
        self.computed = 0

    def compute(self, schedule: BatchSchedule, iteration: Iteration) -> list[int]:
        for request in iteration.started:
            self.fresh.add(request.slot)
            if self.owner[request.slot] != request.session:
                self.owner[request.slot] = request.session
                self.kv[request.slot] = 0
            for position in request.imported:
                context = request.tokens[: position + 1]
                self.kv[request.slot, position] = fingerprint(context, self.offered[request])
        tokens = []
        rows = zip(iteration.slots, iteration.starts, iteration.counts, iteration.sampled, strict=True)
        assert len(set(iteration.slots.tolist())) == len(iteration.slots)
        for slot, start, count, sampled in rows:
            context = schedule.contexts[slot]
            for position in range(start):
                assert self.kv[slot, position] == fingerprint(context[: position + 1], self.version)
            for position in range(start, start + count):
                self.kv[slot, position] = fingerprint(context[: position + 1], self.version)
            if int(slot) in self.fresh:
                # What lay beyond the context of the request is forgotten with its first row.
                self.fresh.remove(int(slot))
                self.kv[slot, start + count :] = 0
            self.computed += int(count)
            if sampled:
                tokens.append(next_token(context[: start + count], self.version))
        return tokens

    def step(self, schedule: BatchSchedule) -> list[Finished]:
        iteration = schedule.plan()
        if iteration is None:
            return []
        tokens = self.compute(schedule, iteration)
        assert len(tokens) == len(iteration.sample_index)
        logprobs = np.array([-token for token in tokens], np.float32)
        return schedule.complete(iteration, np.array(tokens, np.int32), logprobs, self.version)


def make_schedule(
    slots: int = 4, max_running: int = 2, max_batch_tokens: int = 100, stops: tuple[int, ...] = ()
) -> BatchSchedule:
    return BatchSchedule(
        slots=slots,
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        max_context=CONTEXT,
        stop_tokens=stops,
    )


def make_request(session: str, tokens: list[int], max_new_tokens: int = 3) -> Request:
    return Request(session, np.array(tokens, np.int32), max_new_tokens, temperature=1.0, seed=0)


def make_prefill(session: str, tokens: list[int]) -> Request:
    return Request(session, np.array(tokens, np.int32), 0, temperature=0.0, seed=0, samples=False)


def run(schedule: BatchSchedule, model: TransparentModel, limit: int = 200) -> list[Finished]:
    finished = []
    while schedule.has_work():
        finished += model.step(schedule)
        limit -= 1
        assert limit, "the schedule does not end"
    return finished


def expected(tokens: list[int], count: int, version: int = 0) -> list[int]:
    context = list(tokens)
    for _ in range(count):
        context.append(next_token(np.array(context, np.int32), version))
    return context[len(tokens) :]


def test_a_turn_reuses_what_the_last_one_cached() -> None:
    schedule, model = make_schedule(), TransparentModel(4)
    schedule.submit(make_request("a", [1, 2, 3, 4]))
    (first,) = run(schedule, model)
    assert first.tokens.tolist() == expected([1, 2, 3, 4], 3)
    # 4 of the prompt and 2 of the 3 sampled ones: nothing needed the last one's KV.
    assert (model.computed, schedule.counters.cached_tokens) == (6, 0)
    context = [1, 2, 3, 4, *first.tokens.tolist(), 5, 6]
    schedule.submit(make_request("a", context, 1))
    (second,) = run(schedule, model)
    assert second.tokens.tolist() == expected(context, 1)
    assert (model.computed, schedule.counters.cached_tokens) == (6 + 3, 6)
    assert schedule.counters.prefill_tokens == 4 + 3
    assert schedule.counters.decode_tokens == 4


def test_reuse_ends_where_the_context_differs() -> None:
    schedule, model = make_schedule(), TransparentModel(4)
    schedule.submit(make_request("a", [1, 2, 3, 4], 1))
    run(schedule, model)
    schedule.submit(make_request("a", [1, 2, 5, 4, 4], 1))
    (end,) = run(schedule, model)
    assert end.tokens.tolist() == expected([1, 2, 5, 4, 4], 1)
    assert model.computed == 4 + 3


def test_the_same_context_again_computes_one_token() -> None:
    schedule, model = make_schedule(), TransparentModel(4)
    for _ in range(2):
        schedule.submit(make_request("a", [1, 2, 3, 4], 1))
        (end,) = run(schedule, model)
        assert end.tokens.tolist() == expected([1, 2, 3, 4], 1)
    assert model.computed == 4 + 1


def test_a_stop_token_ends_the_request_and_is_among_its_tokens() -> None:
    tokens = expected([3, 1], 10)
    schedule, model = make_schedule(stops=(tokens[2],)), TransparentModel(4)
    schedule.submit(make_request("a", [3, 1], 10))
    (end,) = run(schedule, model)
    assert end.tokens.tolist() == tokens[: tokens.index(tokens[2]) + 1]
    assert end.stop is StopReason.STOP
    assert end.logprobs.tolist() == [-token for token in end.tokens]


def test_long_prompts_are_prefilled_in_chunks_first_come_first_served_while_others_decode() -> None:
    schedule, model = make_schedule(max_running=3, max_batch_tokens=4), TransparentModel(4)
    schedule.submit(make_request("early", [1], 9))
    model.step(schedule)
    schedule.submit(make_request("first", [1, 2, 3, 4, 5, 6], 1))
    schedule.submit(make_request("second", [2, 2, 3, 4], 1))
    counts = []
    while (iteration := schedule.plan()) is not None:
        by_session = {
            schedule._in_slot[slot].session: int(count)  # type: ignore[union-attr]
            for slot, count in zip(iteration.slots, iteration.counts, strict=True)
        }
        counts.append(by_session)
        tokens = np.array(model.compute(schedule, iteration), np.int32)
        schedule.complete(iteration, tokens, np.zeros(len(tokens), np.float32), 0)
    assert counts[:3] == [
        {"early": 1, "first": 4},
        {"early": 1, "first": 2, "second": 2},
        {"early": 1, "second": 2},
    ]


def test_the_least_recently_used_idle_session_makes_room() -> None:
    schedule, model = make_schedule(slots=2, max_running=1), TransparentModel(2)
    for session in ("a", "b"):
        schedule.submit(make_request(session, [1, 2, 3], 1))
        run(schedule, model)
    schedule.submit(make_request("a", [1, 2, 3, 4], 1))
    run(schedule, model)  # b is now the oldest
    schedule.submit(make_request("c", [4, 4], 1))
    run(schedule, model)
    assert schedule.sessions == 2
    before = model.computed
    schedule.submit(make_request("a", [1, 2, 3, 4], 1))
    run(schedule, model)
    assert model.computed - before == 1
    schedule.submit(make_request("b", [1, 2, 3], 1))
    (end,) = run(schedule, model)
    assert end.tokens.tolist() == expected([1, 2, 3], 1)
    assert model.computed - before == 1 + 3


def test_an_idle_session_whose_next_turn_waits_is_not_the_one_evicted() -> None:
    schedule, model = make_schedule(slots=2, max_running=1), TransparentModel(2)
    for session in ("a", "b"):
        schedule.submit(make_request(session, [1, 2, 3], 1))
        run(schedule, model)
    schedule.submit(make_request("c", [5], 1))
    schedule.submit(make_request("a", [1, 2, 3, 4], 1))
    before = model.computed
    run(schedule, model)
    assert model.computed - before == 1 + 1


def test_after_an_update_a_running_request_recomputes_all_and_goes_on_under_the_new_weights() -> None:
    schedule, model = make_schedule(), TransparentModel(4)
    schedule.submit(make_request("a", [1, 2, 3, 4], 6))
    schedule.submit(make_request("idle", [1, 2], 1))
    for _ in range(3):
        model.step(schedule)
    schedule.suspend()
    assert schedule.plan() is None
    model.version = 1
    schedule.invalidate()
    assert schedule.sessions == 1
    assert schedule.plan() is None
    schedule.resume()
    (end,) = run(schedule, model)
    old = expected([1, 2, 3, 4], 3)
    assert end.tokens.tolist() == [*old, *expected([1, 2, 3, 4, *old], 3, version=1)]
    assert end.versions.tolist() == [0, 0, 0, 1, 1, 1]
    assert schedule.counters.recomputed_tokens == 4 + 2
    assert schedule.counters.prefill_tokens == 4 + 2 + 7
    assert model.computed == 4 + 2 + 2 + 7 + 2


def test_an_aborted_request_returns_what_it_has_and_its_session_stays() -> None:
    schedule, model = make_schedule(max_running=1), TransparentModel(4)
    schedule.submit(make_request("a", [1, 2, 3, 4], 9))
    schedule.submit(make_request("waiting", [1, 2], 1))
    for _ in range(2):
        model.step(schedule)
    running, waiting = schedule.abort(["a", "waiting", "unknown"], StopReason.STALE)
    assert (running.stop, running.tokens.tolist()) == (StopReason.STALE, expected([1, 2, 3, 4], 2))
    assert (waiting.stop, waiting.tokens.tolist()) == (StopReason.STALE, [])
    assert (schedule.running, schedule.waiting, schedule.sessions) == (0, 0, 1)
    assert schedule.abort(["a"], StopReason.STALE) == []
    schedule.submit(make_request("a", [1, 2, 3, 4, 5], 1))
    before = model.computed
    run(schedule, model)
    assert model.computed - before == 1


def test_a_prefill_computes_its_context_samples_nothing_and_stays_for_the_next_one() -> None:
    schedule, model = make_schedule(max_batch_tokens=3), TransparentModel(4)
    schedule.submit(make_prefill("a", [1, 2, 3, 4]))
    (end,) = run(schedule, model)
    assert (end.tokens.tolist(), end.stop) == ([], StopReason.LENGTH)
    assert schedule.computed("a") == (0, 4)
    schedule.submit(make_prefill("a", [1, 2, 3, 4, 5, 6]))
    run(schedule, model)
    assert (model.computed, schedule.counters.prefill_tokens) == (4 + 2, 4 + 2)
    assert (schedule.counters.cached_tokens, schedule.counters.decode_tokens) == (4, 0)
    assert schedule.computed("a") == (0, 6)
    assert schedule.computed("unknown") == (-1, 0)


def test_kv_that_comes_with_a_request_is_not_computed_again() -> None:
    schedule, model = make_schedule(), TransparentModel(4)
    request = make_request("a", [1, 2, 3, 4, 5], 3)
    request.offered, model.offered[request] = range(5), 0
    schedule.submit(request)
    (end,) = run(schedule, model)
    assert end.tokens.tolist() == expected([1, 2, 3, 4, 5], 3)
    assert request.imported == range(4)  # the last token is computed, for its logits
    assert (schedule.counters.imported_tokens, schedule.counters.prefill_tokens) == (4, 1)
    context = [1, 2, 3, 4, 5, *end.tokens.tolist(), 6, 6, 6, 6]
    assert schedule.cached("a", np.array(context, np.int32)) == 7
    following = make_request("a", context, 1)
    following.offered, model.offered[following] = range(5, 10), 0
    schedule.submit(following)
    (end,) = run(schedule, model)
    assert end.tokens.tolist() == expected(context, 1)
    assert following.imported == range(7, 10)
    assert schedule.counters.prefill_tokens == 1 + 2


def test_kv_with_a_gap_before_it_is_of_no_use() -> None:
    schedule, model = make_schedule(), TransparentModel(4)
    request = make_request("a", [1, 2, 3, 4, 5], 1)
    request.offered, model.offered[request] = range(2, 4), 0
    schedule.submit(request)
    (end,) = run(schedule, model)
    assert end.tokens.tolist() == expected([1, 2, 3, 4, 5], 1)
    assert (len(request.imported), schedule.counters.prefill_tokens) == (0, 5)


def test_an_update_voids_kv_that_waits_with_its_request() -> None:
    schedule, model = make_schedule(), TransparentModel(4)
    request = make_request("a", [1, 2, 3, 4, 5], 1)
    request.offered, model.offered[request] = range(4), 0
    schedule.submit(request)
    schedule.suspend()
    schedule.invalidate()
    model.version = 1
    schedule.resume()
    (end,) = run(schedule, model)
    assert end.tokens.tolist() == expected([1, 2, 3, 4, 5], 1, version=1)
    assert len(request.imported) == 0


def test_what_a_running_request_has_sampled_can_be_asked_in_parts() -> None:
    schedule, model = make_schedule(), TransparentModel(4)
    schedule.submit(make_request("a", [1, 2, 3, 4], 5))
    assert len(schedule.sampled_since("a", 0).tokens) == 0
    for _ in range(3):
        model.step(schedule)
    tokens = expected([1, 2, 3, 4], 3)
    assert schedule.sampled_since("a", 0).tokens.tolist() == tokens
    rest = schedule.sampled_since("a", 1)
    assert rest.tokens.tolist() == tokens[1:]
    assert rest.logprobs.tolist() == [-token for token in tokens[1:]]
    assert rest.versions.tolist() == [0, 0]
    run(schedule, model)
    assert len(schedule.sampled_since("a", 0).tokens) == 0  # it has ended
    assert len(schedule.sampled_since("unknown", 0).tokens) == 0


def test_what_does_not_fit_is_refused() -> None:
    schedule = make_schedule()
    for request in (
        make_request("a", [], 1),
        make_request("a", [1], 0),
        make_request("a", [1] * CONTEXT, 1),
        make_request("a", [1] * 4, CONTEXT - 3),
        make_prefill("a", []),
        make_prefill("a", [1] * (CONTEXT + 1)),
    ):
        with pytest.raises(ValueError, match=r"fit|at least 1"):
            schedule.submit(request)
    assert schedule.room(CONTEXT - 1) == 1
    assert schedule.room(CONTEXT + 5) == 0
    schedule.submit(make_request("a", [1] * 4, CONTEXT - 4))
    with pytest.raises(ValueError, match="request already"):
        schedule.submit(make_request("a", [1], 1))
    with pytest.raises(ValueError, match="max_sessions"):
        make_schedule(slots=2, max_running=3)


Turn = tuple[str, int, list[int], int, range]


def turns() -> st.SearchStrategy[Turn]:
    """Session, tokens dropped from the end of its history, tokens added, tokens to sample (0: a prefill), and
    tokens whose KV comes with the request."""
    extra = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5)
    offered = st.one_of(
        st.just(range(0)),
        st.builds(range, st.sampled_from([0, 0, 0, 1, 2, 3, 5]), st.integers(0, CONTEXT)),
    )
    dropped = st.sampled_from([0, 0, 1, 2, 4])
    return st.tuples(st.sampled_from("abcde"), dropped, extra, st.integers(0, 5), offered)


class Schedules(RuleBasedStateMachine):
    """Any order of events: every request ends once, with the tokens of the model, computed once."""

    slots, max_running, max_batch_tokens = 4, 3, 5

    def __init__(self) -> None:
        super().__init__()
        self.schedule = make_schedule(self.slots, self.max_running, self.max_batch_tokens, (STOP,))
        self.model = TransparentModel(self.slots)
        self.open: dict[Request, None] = {}
        self.history: dict[str, list[int]] = {}
        self.started: set[Request] = set()
        self.unknown: set[str] = (
            set()
        )  # aborted before its first row: the model cannot tell what was forgotten

    @rule(turns=st.lists(turns(), min_size=1, max_size=5), steps=st.integers(0, 12))
    def submit(self, turns: list[Turn], steps: int) -> None:
        for session, dropped, extra, count, offered in turns:
            if self.schedule.is_busy(session):
                continue
            history = self.history.get(session, [])
            tokens = (history[: len(history) - dropped] + extra)[-(CONTEXT - count) :]
            request = make_request(session, tokens, count) if count else make_prefill(session, tokens)
            request.offered = range(offered.start, min(offered.stop, len(tokens)))
            self.model.offered[request] = self.model.version
            self.schedule.submit(request)
            self.open[request] = None
        self.steps(steps)

    @rule(sessions=st.lists(st.sampled_from("abcde"), max_size=3))
    def abort(self, sessions: list[str]) -> None:
        self.unknown |= {request.session for request in self.open if request.slot in self.model.fresh}
        busy = {session for session in sessions if self.schedule.is_busy(session)}
        finished = self.schedule.abort(sessions, StopReason.CANCELLED)
        assert {end.request.session for end in finished} == busy
        assert all(end.stop is StopReason.CANCELLED for end in finished)
        assert not any(self.schedule.is_busy(session) for session in sessions)
        self.end(finished)

    @rule(session=st.sampled_from("abcde"))
    def end_session(self, session: str) -> None:
        self.end(self.schedule.end_session(session))
        assert not self.schedule.is_busy(session)
        self.model.owner = [None if owner == session else owner for owner in self.model.owner]

    @rule(update=st.booleans(), resume=st.sampled_from([True, True, False]))
    def suspend(self, update: bool, resume: bool) -> None:
        self.schedule.suspend()
        assert self.schedule.plan() is None
        if update:
            self.model.version += 1
            self.schedule.invalidate()
            assert self.schedule.sessions == self.schedule.running
        if resume:
            self.schedule.resume()

    @rule()
    def resume(self) -> None:
        self.schedule.resume()

    @rule(steps=st.integers(1, 12))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            if self.schedule.has_work():
                self.step()

    def step(self) -> None:
        iteration = self.schedule.plan()
        assert iteration is not None
        for request in iteration.started:
            assert request in self.open
            assert request not in self.started
            self.started.add(request)
        self.check(iteration)
        tokens = self.model.compute(self.schedule, iteration)
        self.end(
            self.schedule.complete(
                iteration,
                np.array(tokens, np.int32),
                np.array([-token for token in tokens], np.float32),
                self.model.version,
            )
        )

    def check(self, iteration: Iteration) -> None:
        """Budgets hold, something is done, and nothing valid is computed again."""
        requests = {request.slot: request for request in self.open if request.slot >= 0}
        assert len(iteration.slots) > 0
        assert (iteration.counts > 0).all()
        prefill = 0
        for slot, start, count in zip(iteration.slots, iteration.starts, iteration.counts, strict=True):
            request = requests[int(slot)]
            prompt = len(request.tokens)
            if count > 1 or start < prompt:
                prefill += int(count)
            if self.model.owner[slot] != request.session or request.session in self.unknown:
                continue
            for position in range(start, start + count):
                valid = fingerprint(self.schedule.contexts[slot, : position + 1], self.model.version)
                assert self.model.kv[slot, position] != valid or position == prompt - 1
        assert prefill <= self.max_batch_tokens

    def end(self, finished: list[Finished]) -> None:
        for end in finished:
            del self.open[end.request]
            made = end.tokens.tolist()
            context = [*end.request.tokens.tolist(), *made]
            self.history[end.request.session] = context
            for index, version in enumerate(end.versions):
                seen = np.array(context[: len(context) - len(made) + index], np.int32)
                assert made[index] == next_token(seen, int(version))
                assert end.logprobs[index] == -made[index]
            assert len(made) <= end.request.max_new_tokens
            assert STOP not in made[:-1]
            if end.stop is StopReason.STOP:
                assert made[-1] == STOP
            if end.stop is StopReason.LENGTH:
                assert len(made) == end.request.max_new_tokens

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.schedule.running + self.schedule.waiting == len(self.open)
        assert self.schedule.running <= self.max_running
        assert self.schedule.running <= self.schedule.sessions <= self.slots
        held = [request.slot for request in self.open if request.slot >= 0]
        assert len(set(held)) == len(held) == self.schedule.running

    def teardown(self) -> None:
        self.schedule.resume()
        for _ in range(2000):
            if not self.schedule.has_work():
                break
            self.step()
        assert not self.open


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking a failure takes minutes
)
