"""An inference engine without a model, whose time is computed: vLLM's scheduling and modelled iterations.

Everything takes as long, on the event loop's clock, as the model of iterations, pulls and updates says. The
loop has no timer an iteration, only one at the next moment at which somebody could notice something.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from infra.clock import LOOP_CLOCK, Clock, Timer
from infra.rpc import RpcError
from tasks.rollout.engines.base import EngineStats, GenerateRequest, Generation, HeldKv, KvSource
from tasks.rollout.engines.kv_imports import ImportAborted, KvConnections, KvImports, log_rejected
from tasks.rollout.engines.modelled.limits import EngineLimits, IterationTiming
from tasks.rollout.engines.modelled.schedule import ModelledSchedule
from tasks.rollout.engines.modelled.turns import Ended, Turn
from tasks.rollout.engines.request_check import require_valid, session_busy
from tasks.trajectory import StopReason

TOKENS = 2**31 - 1
"""Ids are below it: they say no more than that there is a token."""


class ModelledEngine:
    """`HostedEngine`, `PullingEngine` and `KvEngine` by a `ModelledSchedule`.

    A turn's first token is drawn from its seed, between 1 and 2**31 - 2 and not the end token; the others are
    1, and the last one is the end token if nothing cut the turn. Log-probabilities are 0. As with vLLM, the
    KV of a session that ended stays until its room is needed. A turn that goes on elsewhere
    (`sampled_before`) has the length that it would have had.

    `generate` raises `RpcError` with the codes of the embedded engine; `load_weights` raises `not_suspended`
    and whatever `pull` does.
    """

    def __init__(
        self,
        *,
        timing: IterationTiming,
        limits: EngineLimits,
        response_tokens: Callable[[GenerateRequest], int],
        end_token: int,
        kv_tokens: int,
        pull: Callable[[int], Awaitable[None]],
        update_s: float,
        prompt_of: Callable[[GenerateRequest], tuple[str, int]] | None = None,
        kv_transfer_s: Callable[[int], float] = lambda tokens: 0.0,
        kv_limit_s: float = 60.0,
        clock: Clock = LOOP_CLOCK,
        version: int = 0,
    ):
        """`response_tokens` tells a turn's length, end token included, if nothing cuts it; `prompt_of` the
        name and length of the prompt that its group shares. `pull` takes as long as a version takes to get
        here, `update_s` is what putting it in place takes, `kv_transfer_s` the time that KV of so many tokens
        takes from another engine. Iterations take their time on `clock`.

        Raises ValueError where the KV of one context does not fit `kv_tokens`, and on an end token of 1.
        """
        if end_token == 1:
            raise ValueError("the end token must not be 1: every token that is no other is a 1")
        self._clock = clock
        self._schedule = ModelledSchedule(limits, timing, kv_tokens, version)
        self._response_tokens = response_tokens
        self._end_token = end_token
        self._pull = pull
        self._update_s = update_s
        self._prompt_of = prompt_of
        self._kv_transfer_s = kv_transfer_s
        self._imports = KvImports()
        self._kv_connections = KvConnections(kv_limit_s)
        self._exported_tokens = 0
        self._futures: dict[Turn, asyncio.Future[Ended]] = {}
        self._changing_weights = asyncio.Lock()
        self._pulling = asyncio.Lock()
        self._pulled: int | None = None  # a version that waits to be put in place
        self._timer: Timer | None = None
        self._recomputed_before = 0
        self._rebuilt = asyncio.Event()
        self._failed: asyncio.Future[None] | None = None
        self._failure: RpcError | None = None

    async def __aenter__(self) -> Self:
        self._failed = asyncio.get_running_loop().create_future()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._fail(RpcError("engine_failed", "the engine was stopped"))
        self._imports.abort_all()
        await self._kv_connections.close()
        assert self._failed is not None
        self._failed.cancel()

    async def wait_failed(self) -> None:
        """Raises what ended the engine, once something has."""
        assert self._failed is not None
        await asyncio.shield(self._failed)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples fewer than `max_new_tokens` where the context ends first; the stop is then LENGTH."""
        room = self._check(request)
        wanted = max(1, self._response_tokens(request) - request.sampled_before)
        to_sample = min(wanted, request.max_new_tokens, room)
        turn = Turn(request.session, len(request.tokens), to_sample, stops=wanted == to_sample)
        if self._prompt_of is not None:
            turn.prompt_key, turn.prompt_tokens = self._prompt_of(request)
        if request.kv is not None:
            try:
                turn.offered = await self._fetch(request, request.kv)
            except ImportAborted as aborted:
                return Generation.of_nothing(aborted.reason)
        return self._generation(request, await self._run(turn))

    async def prefill(self, session: str, tokens: NDArray[np.int32]) -> HeldKv:
        held = len(tokens) - 1
        if held < 1:
            raise RpcError("invalid_request", "a context of less than two tokens leaves nothing to prefill")
        request = GenerateRequest(session, tokens, max_new_tokens=1, temperature=0, seed=0)
        self._check(request)
        turn = Turn(session, held, 0)
        if self._prompt_of is not None:
            turn.prompt_key, turn.prompt_tokens = self._prompt_of(request)
        done = await self._run(turn)
        if done.stop is not StopReason.LENGTH:
            raise RpcError("prefill_aborted", done.stop.value)
        return HeldKv(session, held, self._schedule.version)

    async def export_kv(self, key: str, start: int, count: int) -> dict[str, Any]:
        """Whole blocks; `key` is a session. The answer says how much of what KV, and carries none."""
        computed = self._schedule.held(key, self._clock.now())
        if not 0 <= start < computed or count < 1:
            raise RpcError(
                "kv_gone", f"of session {key!r}, KV of {computed} tokens is held, none from {start}"
            )
        count = min(count, computed - start)
        self._exported_tokens += count
        return {"version": self._schedule.version, "start": start, "count": count}

    async def abort(self, sessions: list[str], reason: StopReason) -> None:
        self._imports.abort(sessions, reason)
        self._settle(self._schedule.abort(self._clock.now(), sessions, reason))

    async def end_session(self, session: str) -> None:
        """A request that the session still has ends as cancelled."""
        if self._schedule.is_busy(session) or self._imports.has(session):
            await self.abort([session], StopReason.CANCELLED)
        self._schedule.forget(session)

    async def suspend(self) -> None:
        """Returns once the iteration under way is over."""
        frozen, ended = self._schedule.suspend(self._clock.now())
        self._settle(ended)
        if frozen > self._clock.now():
            await self._clock.sleep(frozen - self._clock.now())
        self._settle(self._schedule.advance(max(frozen, self._clock.now())))

    async def load_weights(self, version: int) -> None:
        async with self._changing_weights:
            if not self._schedule.suspended:
                raise RpcError("not_suspended", "weights are replaced only while the engine is suspended")
            if self._pulled != version:
                await self.prefetch(version)
            self._pulled = None
            await asyncio.sleep(self._update_s)
            self._settle(self._schedule.advance(self._clock.now()))
            self._schedule.invalidate(version)
            self._recomputed_before = self._schedule.counters(self._clock.now()).recomputed_tokens

    async def prefetch(self, version: int) -> None:
        async with self._pulling:
            self._pulled = None
            await self._pull(version)
            self._pulled = version

    async def resume(self) -> None:
        async with self._changing_weights:
            self._settle(self._schedule.resume(self._clock.now()))

    async def recompute(self) -> int:
        while self._schedule.recomputing and not self._schedule.suspended:
            if self._failure is not None:
                raise self._failure
            self._schedule.watched = True
            self._set_timer()
            self._rebuilt.clear()
            await self._rebuilt.wait()
        return self._schedule.counters(self._clock.now()).recomputed_tokens - self._recomputed_before

    async def stats(self) -> EngineStats:
        self._settle(self._schedule.advance(self._clock.now()))
        schedule, counters = self._schedule, self._schedule.counters(self._clock.now())
        return EngineStats(
            version=schedule.version,
            running=schedule.running,
            waiting=schedule.waiting + self._imports.running,
            sessions=schedule.running + schedule.kept_sessions,
            suspended=schedule.suspended,
            prefill_tokens=counters.prefill_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            decode_tokens=counters.decode_tokens,
            cached_tokens=counters.cached_tokens,
            steps=counters.steps,
            busy_seconds=counters.busy_seconds,
            kv_exported_tokens=self._exported_tokens,
            kv_imported_tokens=counters.imported_tokens,
        )

    @property
    def preemptions(self) -> int:
        return self._schedule.counters(0.0).preemptions

    def _check(self, request: GenerateRequest) -> int:
        if self._failure is not None:
            raise self._failure
        room = require_valid(request, TOKENS, self._schedule.limits.max_context)
        if self._schedule.is_busy(request.session) or self._imports.has(request.session):
            raise session_busy(request.session)
        return room

    async def _fetch(self, request: GenerateRequest, source: KvSource) -> range:
        """Which tokens' KV came. Raises `ImportAborted`; where the source has none, none came."""
        start = self._schedule.held(request.session, self._clock.now())
        count = len(request.tokens) - 1 - start
        if count < 1:
            return range(0)
        fetched = await self._imports.fetch(request.session, self._pull_kv(source, start, count))
        if self._failure is not None:
            raise self._failure
        return fetched

    async def _pull_kv(self, source: KvSource, start: int, count: int) -> range:
        try:
            answer = await self._kv_connections.export(source, start, count)
        except (RpcError, TimeoutError) as error:
            log_rejected(source, f"from token {start} on", error)
            return range(0)
        await asyncio.sleep(self._kv_transfer_s(answer["count"]))
        if answer["version"] != self._schedule.version:
            return range(0)
        return range(start, start + answer["count"])

    async def _run(self, turn: Turn) -> Ended:
        self._settle(self._schedule.submit(self._clock.now(), turn))
        future = self._futures[turn] = asyncio.get_running_loop().create_future()
        try:
            return await future
        except asyncio.CancelledError:
            if self._futures.pop(turn, None) is not None:
                self._settle(self._schedule.abort(self._clock.now(), [turn.session], StopReason.CANCELLED))
            raise

    def _generation(self, request: GenerateRequest, ended: Ended) -> Generation:
        count = ended.sampled
        tokens = np.ones(count, np.int32)
        if count and not request.sampled_before:
            tokens[0] = _first_token(request.seed, self._end_token)
        if ended.stop is StopReason.STOP:
            tokens[-1] = self._end_token
        versions = ended.turn.versions
        stamps = np.repeat(
            np.array([version for version, _ in versions], np.int32), [sampled for _, sampled in versions]
        )
        return Generation(tokens, np.zeros(count, np.float32), stamps, ended.stop)

    def _settle(self, ended: list[Ended]) -> None:
        for end in ended:
            future = self._futures.pop(end.turn, None)
            if future is not None and not future.done():
                future.set_result(end)
        if self._schedule.watched and (not self._schedule.recomputing or self._schedule.suspended):
            self._schedule.watched = False
            self._rebuilt.set()
        self._set_timer()

    def _set_timer(self) -> None:
        when = self._schedule.next_event() if self._failure is None else None
        timer = self._timer
        if timer is not None:
            if when == timer.when() and not timer.cancelled():
                return
            timer.cancel()
        self._timer = None if when is None else self._clock.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        # The loop may call a little early, by its clock's resolution.
        assert self._timer is not None
        when, self._timer = max(self._clock.now(), self._timer.when()), None
        try:
            self._settle(self._schedule.advance(when, begin=True))
        except Exception as error:
            self._fail(RpcError("engine_failed", f"{type(error).__name__}: {error}"))
            assert self._failed is not None
            self._failed.set_exception(error)

    def _fail(self, error: RpcError) -> None:
        self._failure = error
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._rebuilt.set()
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
        self._futures.clear()


def _first_token(seed: int, end_token: int) -> int:
    """Between 1 and 2**31 - 2, all but the end token."""
    # The finaliser of SplitMix64 (Steele et al. 2014): neighbouring seeds give unrelated tokens.
    mixed = (seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    token = 1 + ((mixed ^ (mixed >> 31)) % (TOKENS - 2))
    return token if token < end_token else token + 1
