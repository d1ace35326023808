"""vLLM V1's continuous batching from event to event. Pure.

What vLLM's scheduler decides once an iteration is decided here as often, by a `Batch`. But how many of them
will be alike is known in closed form: while only decodes run, every context grows by one token an iteration,
so which turn ends first, when blocks run out and how long all that takes need no loop.

Commands take effect between two iterations: an iteration under way ends when it would have. What it would
have sampled for a turn that is aborted meanwhile is lost.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from infra.performance.iteration import BatchWork
from tasks.rollout.engines.modelled.batch import Batch, Chunk
from tasks.rollout.engines.modelled.limits import EngineLimits, IterationTiming
from tasks.rollout.engines.modelled.turns import Counters, Ended, Turn
from tasks.trajectory import StopReason


@dataclass(slots=True)
class _Run:
    """Iterations under way, all alike but for the contexts that grow."""

    began: float
    ends: float
    iterations: int
    decodes: int
    decode_context: int
    chunks: list[Chunk]  # if there are any, it is one iteration


class ModelledSchedule:
    """Which turn runs when. Times are seconds and never decrease from call to call."""

    def __init__(self, limits: EngineLimits, timing: IterationTiming, kv_tokens: int, version: int = 0):
        """Raises ValueError where the KV of one context does not fit `kv_tokens`."""
        self.limits = limits
        self.version = version
        self.suspended = False
        self.watched = False
        """Whether somebody waits for `recomputing` to become empty: then each iteration's end is an event."""
        self.recomputing: set[Turn] = set()
        """Turns that lack KV which they had before the weights changed."""
        self._timing = timing
        self._counters = Counters()
        self._batch = Batch(limits, kv_tokens, self._counters)
        self._turns: dict[str, Turn] = {}
        self._run: _Run | None = None
        self._at = 0.0  # no iteration begins earlier

    @property
    def running(self) -> int:
        return len(self._batch.running)

    @property
    def waiting(self) -> int:
        return len(self._batch.waiting)

    @property
    def kept_sessions(self) -> int:
        """Sessions without a turn of which KV is kept."""
        return self._batch.cache.kept_sessions

    def is_busy(self, session: str) -> bool:
        return session in self._turns

    def has_work(self) -> bool:
        return not self.suspended and bool(self._batch.running or self._batch.waiting)

    def counters(self, now: float) -> Counters:
        """As they are at this moment, in the middle of iterations too."""
        run, counters = self._run, replace(self._counters)
        if run is not None:
            done = self._whole_iterations(run, now)
            counters.steps += done
            counters.decode_tokens += done * run.decodes
            counters.busy_seconds += max(0.0, min(now, run.ends) - run.began)
        return counters

    def held(self, session: str, now: float) -> int:
        """First tokens of the session's context whose KV is here."""
        turn = self._turns.get(session)
        if turn is None or turn.order < 0:
            return self._batch.cache.kept(session) * self.limits.block_tokens
        if turn.decoding:
            return self._batch.decodes.computed(turn) + self._whole_iterations(self._run, now)
        return turn.computed

    def forget(self, session: str) -> None:
        """A session without a turn is over."""
        self._batch.cache.forget(session)

    # Time

    def advance(self, now: float, begin: bool = False) -> list[Ended]:
        """What ended by `now`. Iterations begin that should have before it, with `begin` also those that
        should just now: so what arrives at one instant runs together."""
        ended: list[Ended] = []
        while True:
            run = self._run
            if run is not None:
                if run.ends > now:
                    return ended
                self._complete(run, ended)
            elif not self.has_work() or self._at > now or (self._at == now and not begin) or not self._plan():
                return ended

    def next_event(self) -> float | None:
        """When to call `advance` (with `begin`) again if nothing else happens: no turn ends before that."""
        run = self._run
        if run is None:
            return self._at if self.has_work() else None
        if (self.recomputing and self.watched) or self.suspended:
            return run.ends
        return run.ends + self._quiet_after(run)

    # Events

    def submit(self, now: float, turn: Turn) -> list[Ended]:
        """Raises ValueError on a second turn of a session, or one that does not fit. Returns what ended."""
        ended = self.advance(now)
        if turn.session in self._turns:
            raise ValueError(f"session {turn.session!r} has a request already")
        if not 0 < turn.context <= turn.context + turn.to_sample <= self.limits.max_context:
            raise ValueError(
                f"{turn.context} tokens and {turn.to_sample} to sample do not fit a context of "
                f"{self.limits.max_context}"
            )
        self._turns[turn.session] = turn
        blocked = self._batch.full or bool(self._batch.waiting)
        self._batch.wait(turn)
        self._wake(now)
        if not blocked:
            self._cut(now)
        return ended

    def abort(self, now: float, sessions: Iterable[str], reason: StopReason) -> list[Ended]:
        """End these sessions' turns with what they have sampled. Returns all that ended."""
        ended = self.advance(now)
        for session in sessions:
            turn = self._turns.get(session)
            if turn is None:
                continue
            self._cut(now)
            run = self._run
            if run is not None and turn.decoding:
                run.decodes -= 1
            self._batch.leave(turn, run.chunks if run is not None else None)
            self._end(turn, now, reason, ended)
        self._wake(now)
        return ended

    def suspend(self, now: float) -> tuple[float, list[Ended]]:
        """No iteration begins until `resume`. Returns when the one under way is over, and what ended."""
        ended = self.advance(now)
        self.suspended = True
        self._cut(now)
        return (now if self._run is None else max(now, self._run.ends)), ended

    def resume(self, now: float) -> list[Ended]:
        ended = self.advance(now)
        self.suspended = False
        self._wake(now)
        return ended

    def invalidate(self, version: int) -> None:
        """Other weights: nothing that is cached holds any more. Running turns wait again, first in the queue
        and in their order, and compute their whole context, sampled tokens included. While suspended, between
        iterations."""
        if self._run is not None or not self.suspended:
            raise ValueError("weights change only while suspended, when no iteration is under way")
        batch = self._batch
        for turn in reversed(list(batch.running)):
            turn.stale = max(turn.stale, batch.preempt(turn, keep=False))
            if turn.stale:
                self.recomputing.add(turn)
        for turn in batch.waiting:
            turn.offered = range(0)
            self._stamp(turn)
        batch.cache.forget_all()
        self.version = version

    # Iterations

    def _plan(self) -> bool:
        """Begin what comes next, at `_at`; False where nothing can."""
        chunks, preempted = self._batch.form()
        decodes, context = self._batch.decodes.count, self._batch.decodes.context
        iterations = 1
        if chunks:
            attended = sum(count * (start + count / 2) for _, start, count in chunks)
            tokens = sum(count for _, _, count in chunks)
            seconds = self._timing.seconds(BatchWork(decodes, context, tokens, attended, len(chunks)))
        elif decodes:
            if not preempted:
                iterations = self._batch.decodes.alike(self._batch.cache.available)
            # Otherwise nobody was admitted, but the next iteration may.
            seconds = self._timing.decode_seconds(decodes, context, iterations)
        else:
            return preempted
        self._run = _Run(self._at, self._at + seconds, iterations, decodes, context, chunks)
        return True

    def _complete(self, run: _Run, ended: list[Ended]) -> None:
        batch, counters = self._batch, self._counters
        if run.iterations > 1:
            batch.claim_ahead(run.iterations - 1)
        batch.decodes.tick += run.iterations
        self._run, self._at = None, run.ends
        counters.steps += run.iterations
        counters.decode_tokens += run.iterations * run.decodes
        counters.busy_seconds += run.ends - run.began
        for turn in batch.decodes.ended():
            batch.stop(turn)
            self._end(turn, run.ends, _stop(turn), ended)
        for chunk in run.chunks:
            if chunk.turn in batch.running:
                self._computed(chunk, run.ends, ended)

    def _computed(self, chunk: Chunk, at: float, ended: list[Ended]) -> None:
        turn, start, count = chunk
        self._counters.prefill_tokens += count
        if turn.stale:
            self._counters.recomputed_tokens += max(0, min(start + count, turn.stale) - start)
            if start + count >= turn.stale:
                turn.stale = 0
                self.recomputing.discard(turn)
        if not self._batch.computed_to(turn, start + count):
            return
        if turn.to_sample:
            if not turn.sampled:
                turn.first_at = at
            turn.sampled += 1
            turn.length += 1
            self._counters.decode_tokens += 1
            if turn.sampled < turn.to_sample:
                self._batch.decodes.add(turn)
                return
        self._batch.stop(turn)
        self._end(turn, at, _stop(turn), ended)

    def _whole_iterations(self, run: _Run | None, now: float) -> int:
        """Of those under way, the ones that are over."""
        if run is None or now <= run.began:
            return 0
        if now >= run.ends:
            return run.iterations
        if run.iterations == 1:
            return 0
        done = self._timing.decode_iterations(run.decodes, run.decode_context, now - run.began)
        return min(done, run.iterations - 1)

    def _cut(self, now: float) -> None:
        """Let only the iteration under way go on, and nothing follow it unplanned."""
        run = self._run
        if run is None or run.iterations == 1:
            return
        done = self._whole_iterations(run, now)
        seconds, began = self._timing.decode_seconds, run.began
        run.ends = began + seconds(run.decodes, run.decode_context, done + 1)
        run.iterations = 1
        if not done:
            return
        self._batch.claim_ahead(done)
        self._batch.decodes.tick += done
        run.began = began + seconds(run.decodes, run.decode_context, done)
        run.decode_context += done * run.decodes
        self._counters.steps += done
        self._counters.decode_tokens += done * run.decodes
        self._counters.busy_seconds += run.began - began

    def _quiet_after(self, run: _Run) -> float:
        """Seconds after a run in which surely no turn ends, whatever waits by then."""
        batch = self._batch
        decodes = batch.decodes
        if run.iterations > 1 or not decodes.count:
            return 0.0
        quiet = decodes.first_end() - decodes.tick - run.iterations
        if batch.waiting:
            quiet = min(quiet, batch.shortest_waiting)
        for turn, start, count in run.chunks:
            left = turn.to_sample - turn.sampled
            quiet = min(quiet, left - 1 if start + count == turn.length else left)
        # Without room for all of it a turn may be preempted, and a smaller batch is a faster one.
        if quiet <= 0 or not batch.surely_fits(run.chunks, quiet):
            return 0.0
        context = decodes.context + decodes.count * run.iterations
        return self._timing.decode_seconds(decodes.count, context, quiet)

    def _end(self, turn: Turn, at: float, stop: StopReason, ended: list[Ended]) -> None:
        del self._turns[turn.session]
        self.recomputing.discard(turn)
        self._stamp(turn)
        ended.append(Ended(turn, at, turn.sampled, stop))

    def _stamp(self, turn: Turn) -> None:
        if turn.sampled > turn.versioned:
            turn.versions.append((self.version, turn.sampled - turn.versioned))
            turn.versioned = turn.sampled

    def _wake(self, now: float) -> None:
        if self._run is None:
            self._at = max(self._at, now)


def _stop(turn: Turn) -> StopReason:
    return StopReason.STOP if turn.stops and turn.to_sample else StopReason.LENGTH
