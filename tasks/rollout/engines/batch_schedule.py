"""Continuous batching as a state machine: events in, the next iteration out.

It knows no model, no asyncio and no clock. Every running request holds a slot of the KV cache; the state of
all slots lies in arrays, so an iteration costs the same to plan for one request and for a hundred.

waiting --(slot, place in the batch)--> running: prefill in chunks, decode --> finished: the session keeps its
slot idle, until its next turn reuses what is cached, it ends, or it is the least recently used and evicted.
"""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from tasks.rollout.engines.requests import Counters, Finished, Iteration, Request, Sampled
from tasks.trajectory import StopReason


class BatchSchedule:
    """Which request runs when and where. Events come between `complete` and the next `plan`."""

    def __init__(
        self,
        *,
        slots: int,
        max_running: int,
        max_batch_tokens: int,
        max_context: int,
        stop_tokens: Collection[int],
    ):
        """`max_batch_tokens` bounds an iteration's prefill. Raises ValueError on too few slots."""
        if slots < max_running:
            raise ValueError(
                f"max_sessions ({slots}) must be at least max_running ({max_running}): change one of them"
            )
        self.max_context = max_context
        self.contexts = np.zeros(
            (slots, max_context), np.int32
        )  # token ids: the context and what was sampled
        self.counters = Counters()
        self.suspended = False
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens
        self._stop_tokens = np.array(sorted(stop_tokens), np.int32)
        self._logprobs = np.zeros((slots, max_context), np.float32)
        self._versions = np.zeros((slots, max_context), np.int32)
        self._length = np.zeros(slots, np.int64)  # tokens of the context, sampled ones included
        self._computed = np.zeros(slots, np.int64)  # of these, the first ones, whose KV is in the cache
        self._prompt = np.zeros(slots, np.int64)  # length before anything was sampled
        self._limit = np.zeros(slots, np.int64)  # length at which the request ends
        self._stale = np.zeros(slots, np.int64)  # tokens that were computed before the weights changed
        self._arrival = np.zeros(slots, np.int64)
        self._is_running = np.zeros(slots, np.bool_)
        self._samples = np.zeros(slots, np.bool_)
        self._in_slot: list[Request | None] = [None] * slots
        self._free = list(range(slots))  # a heap: low slots first keeps the used memory together
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._sessions: dict[str, int] = {}  # every session that holds a slot
        self._idle: OrderedDict[str, int] = OrderedDict()  # of these, those not running, oldest use first
        self._started = 0

    @property
    def running(self) -> int:
        return len(self._sessions) - len(self._idle)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def recomputing(self) -> bool:
        """Whether a running request still lacks KV that it had before the weights changed."""
        return bool((self._is_running & (self._computed < self._stale)).any())

    @property
    def sessions(self) -> int:
        """Sessions that hold a slot."""
        return len(self._sessions)

    def room(self, context: int) -> int:
        """Tokens that can be sampled after a context of this length."""
        return max(0, self.max_context - context)

    def is_busy(self, session: str) -> bool:
        """Whether the session has a request that waits or runs."""
        return session in self._waiting or (session in self._sessions and session not in self._idle)

    def cached(self, session: str, context: NDArray[np.int32]) -> int:
        """How many of the context's first tokens a request of the session would find in the cache, were it to
        start now."""
        slot = self._idle.get(session)
        return 0 if slot is None else self._reusable(slot, context)

    def computed(self, session: str) -> tuple[int, int]:
        """The session's slot, and how many of its first tokens have their KV there. (-1, 0) without one."""
        slot = self._sessions.get(session, -1)
        return slot, 0 if slot < 0 else int(self._computed[slot])

    def sampled_since(self, session: str, count: int) -> Sampled:
        """What the session's running request has sampled after its first `count` tokens; empty if none runs.

        The request's `sampled_before` tokens are not among these: they belong to its context.
        """
        slot = self._sessions.get(session)
        if slot is None or session in self._idle:
            slot, new = 0, slice(0, 0)
        else:
            new = slice(int(self._prompt[slot]) + count, int(self._length[slot]))
        return Sampled(
            tokens=self.contexts[slot, new].copy(),
            logprobs=self._logprobs[slot, new].copy(),
            versions=self._versions[slot, new].copy(),
        )

    def has_work(self) -> bool:
        return not self.suspended and (bool(self._waiting) or self.running > 0)

    # Events

    def submit(self, request: Request) -> None:
        """Raises ValueError on a second request of a session, or one that does not fit."""
        if self.is_busy(request.session):
            raise ValueError(f"session {request.session!r} has a request already")
        if not 0 < len(request.tokens) <= len(request.tokens) + request.max_new_tokens <= self.max_context:
            raise ValueError(
                f"{len(request.tokens)} tokens and {request.max_new_tokens} to sample do not fit a "
                f"context of {self.max_context}"
            )
        if request.samples != (request.max_new_tokens >= 1):
            raise ValueError(
                f"max_new_tokens must be at least 1, and 0 for a prefill, not {request.max_new_tokens}"
            )
        self._waiting[request.session] = request

    def abort(self, sessions: Iterable[str], reason: StopReason) -> list[Finished]:
        """End these sessions' requests with what they have; idle and unknown sessions are left alone."""
        finished = []
        for session in sessions:
            waiting = self._waiting.pop(session, None)
            if waiting is not None:
                nothing = np.zeros(0, np.int32)
                finished.append(Finished(waiting, nothing, nothing.astype(np.float32), nothing, reason))
            elif session in self._sessions and session not in self._idle:
                finished.append(self._finish(self._sessions[session], reason))
        return finished

    def end_session(self, session: str) -> list[Finished]:
        """Forget a session and free its slot; a request it still has ends as cancelled."""
        finished = self.abort([session], StopReason.CANCELLED)
        self._release(session)
        return finished

    def suspend(self) -> None:
        """No iteration is planned until `resume`."""
        self.suspended = True

    def resume(self) -> None:
        self.suspended = False

    def invalidate(self) -> None:
        """The weights changed: nothing that is cached holds any more.

        Running requests compute their whole context again, sampled tokens included, before their next token;
        idle sessions are forgotten.
        """
        for session in list(self._idle):
            self._release(session)
        for request in self._waiting.values():
            request.offered = range(0)
        np.maximum(self._stale, self._computed, out=self._stale)
        self._computed[:] = 0

    # Iterations

    def plan(self) -> Iteration | None:
        """Admit what fits and say what to compute next; None when suspended or without work."""
        if not self.has_work():
            return None
        started = self._admit()
        slots = np.flatnonzero(self._is_running)
        starts = self._computed[slots]
        needed = self._length[slots] - starts
        counts = needed
        decoding = (needed == 1) & (starts >= np.maximum(self._prompt[slots], self._stale[slots]))
        prefills = not decoding.all()
        if prefills:
            counts = np.where(decoding, 1, self._chunks(slots, np.where(decoding, 0, needed)))
            included = counts > 0
            slots, starts, counts, needed = (
                slots[included],
                starts[included],
                counts[included],
                needed[included],
            )
        sampled = (counts == needed) & self._samples[slots]
        sampled_slots = slots[sampled]
        sample_index = self._length[sampled_slots] - self._prompt[sampled_slots]
        return Iteration(slots, starts, counts, sampled, sample_index, prefills, started)

    def complete(
        self,
        iteration: Iteration,
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        version: int,
    ) -> list[Finished]:
        """The iteration was computed; `tokens` and `logprobs` are of its sampled rows, in their order."""
        self.counters.decode_tokens += len(tokens)
        if iteration.prefills:
            self._count_prefill(iteration)
        self._computed[iteration.slots] += iteration.counts
        filled = self._end_prefills(iteration) if iteration.prefills else []
        slots = iteration.slots[iteration.sampled]
        at = self._length[slots]
        self.contexts[slots, at] = tokens
        self._logprobs[slots, at] = logprobs
        self._versions[slots, at] = version
        self._length[slots] = at + 1
        stopped = (tokens[:, None] == self._stop_tokens).any(axis=1)
        ended = stopped | (at + 1 == self._limit[slots])
        return filled + [
            self._finish(int(slots[row]), StopReason.STOP if stopped[row] else StopReason.LENGTH)
            for row in np.flatnonzero(ended)
        ]

    def _end_prefills(self, iteration: Iteration) -> list[Finished]:
        slots = iteration.slots[~self._samples[iteration.slots]]
        filled = slots[self._computed[slots] == self._length[slots]]
        return [self._finish(int(slot), StopReason.LENGTH) for slot in filled]

    def _admit(self) -> list[Request]:
        started: list[Request] = []
        while self._waiting and self.running < self._max_running:
            session, request = self._waiting.popitem(last=False)
            self._place(request, self._slot_for(session))
            started.append(request)
        return started

    def _slot_for(self, session: str) -> int:
        if session in self._idle:
            return self._idle.pop(session)
        if not self._free:
            # There is an idle session, since slots are no fewer than places in the batch. One whose next turn
            # waits already is evicted only when all are such.
            unwanted = (idle for idle in self._idle if idle not in self._waiting)
            self._release(next(unwanted, next(iter(self._idle))))
        slot = heapq.heappop(self._free)
        self._sessions[session] = slot
        self._computed[slot] = 0
        return slot

    def _place(self, request: Request, slot: int) -> None:
        context = request.tokens
        prompt = len(context)
        reused = self._reusable(slot, context)
        if request.offered.start <= reused < request.offered.stop:
            request.imported = range(reused, max(reused, min(request.offered.stop, prompt - 1)))
        self.counters.cached_tokens += reused
        self.counters.imported_tokens += len(request.imported)
        self.contexts[slot, :prompt] = context
        self._computed[slot] = reused + len(request.imported)
        self._samples[slot] = request.samples
        self._stale[slot] = 0
        self._length[slot] = self._prompt[slot] = prompt
        self._limit[slot] = prompt + request.max_new_tokens
        self._arrival[slot] = self._started
        self._started += 1
        self._is_running[slot] = True
        self._in_slot[slot] = request
        request.slot = slot

    def _reusable(self, slot: int, context: NDArray[np.int32]) -> int:
        # The last token is computed even if it is cached: its logits are needed.
        comparable = min(int(self._computed[slot]), len(context) - 1)
        same = self.contexts[slot, :comparable] == context[:comparable]
        return comparable if same.all() else int(same.argmin())

    def _chunks(self, slots: NDArray[np.int64], needed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Share out the prefill budget, first come, first served."""
        if int(needed.sum()) <= self._max_batch_tokens:
            return needed
        order = np.argsort(self._arrival[slots], kind="stable")
        before = np.cumsum(needed[order]) - needed[order]
        chunks = np.empty_like(needed)
        chunks[order] = np.clip(self._max_batch_tokens - before, 0, needed[order])
        return chunks

    def _count_prefill(self, iteration: Iteration) -> None:
        slots, starts, ends = iteration.slots, iteration.starts, iteration.starts + iteration.counts
        decoding = starts >= np.maximum(self._prompt[slots], self._stale[slots])
        self.counters.prefill_tokens += int(iteration.counts[~decoding].sum())
        self.counters.recomputed_tokens += int(
            (np.minimum(ends, self._stale[slots]) - starts).clip(min=0).sum()
        )

    def _finish(self, slot: int, stop: StopReason) -> Finished:
        request = self._in_slot[slot]
        assert request is not None
        made = slice(int(self._prompt[slot]), int(self._length[slot]))
        self._in_slot[slot] = None
        self._is_running[slot] = False
        request.slot = -1
        self._idle[request.session] = slot
        return Finished(
            request,
            self.contexts[slot, made].copy(),
            self._logprobs[slot, made].copy(),
            self._versions[slot, made].copy(),
            stop,
        )

    def _release(self, session: str) -> None:
        slot = self._sessions.pop(session, None)
        if slot is not None:
            del self._idle[session]
            heapq.heappush(self._free, slot)
