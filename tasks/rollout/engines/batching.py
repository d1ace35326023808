"""What engines that batch by a `BatchSchedule` share: requests, commands, weights, and their order."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, Self, TypeVar

from infra.rpc import RpcError
from tasks.rollout.engines.base import EngineStats, GenerateRequest, Generation
from tasks.rollout.engines.batch_schedule import BatchSchedule
from tasks.rollout.engines.request_check import require_valid, session_busy
from tasks.rollout.engines.requests import Finished, Request, Sampled
from tasks.trajectory import StopReason

logger = logging.getLogger(__name__)

_POLL_S = 0.002
Weights = TypeVar("Weights")


class BatchingEngine(ABC, Generic[Weights]):
    """`InferenceEngine` and `PullingEngine` but for the iterations themselves and what weights are.

    Beside what the protocol says, `generate` raises `RpcError` with the codes `context_overflow` (no token
    fits after the context), `session_busy`, `invalid_request` and `engine_failed`; `load_weights` raises
    `not_suspended`, and what pulling a version raises.
    """

    def __init__(self, schedule: BatchSchedule, *, vocabulary: int, version: int):
        self._schedule = schedule
        self._vocabulary = vocabulary
        self._version = version
        self._futures: dict[Request, asyncio.Future[Generation]] = {}
        self._changing_weights = asyncio.Lock()
        self._pulling = asyncio.Lock()
        self._pulled: tuple[int, Weights] | None = None  # a version that waits to be put in place
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._failure: RpcError | None = None
        self._recomputed_before = 0
        self._steps = 0
        self._busy_seconds = 0.0

    @abstractmethod
    async def _iterate_for_ever(self) -> None:
        """Plan, compute and complete iterations while there is work; wait for `_wake` while there is none."""

    @abstractmethod
    async def _pull(self, version: int) -> Weights:
        """A published version, beside generation."""

    @abstractmethod
    async def _put_in_place(self, weights: Weights) -> None:
        """From now on iterations compute with these. Only while suspended."""

    async def __aenter__(self) -> Self:
        self._loop_task = asyncio.create_task(self._run(), name=type(self).__name__)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._loop_task is not None
        self._loop_task.cancel()
        await asyncio.wait([self._loop_task])
        self._fail(RpcError("engine_failed", "the engine was stopped"))

    async def wait_failed(self) -> None:
        """Raises what ended the engine, once something has."""
        assert self._loop_task is not None
        await asyncio.shield(self._loop_task)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples fewer than `max_new_tokens` where the context ends first; the stop is then LENGTH."""
        return await self._run_request(self._scheduled(request))

    async def abort(self, sessions: list[str], reason: StopReason) -> None:
        self._settle(self._schedule.abort(sessions, reason))

    async def end_session(self, session: str) -> None:
        """A request that the session still has ends as cancelled."""
        self._settle(self._schedule.end_session(session))

    async def suspend(self) -> None:
        self._schedule.suspend()

    async def load_weights(self, version: int) -> None:
        async with self._changing_weights:
            if not self._schedule.suspended:
                raise RpcError("not_suspended", "weights are replaced only while the engine is suspended")
            if self._pulled is None or self._pulled[0] != version:
                await self.prefetch(version)
            assert self._pulled is not None
            weights, self._pulled = self._pulled[1], None
            await self._put_in_place(weights)
            self._schedule.invalidate()
            self._recomputed_before = self._schedule.counters.recomputed_tokens
            self._version = version

    async def prefetch(self, version: int) -> None:
        async with self._pulling:
            self._pulled = None
            weights = await self._pull(version)
            self._pulled = version, weights

    async def resume(self) -> None:
        async with self._changing_weights:
            self._schedule.resume()
            self._wake.set()

    async def recompute(self) -> int:
        while self._schedule.recomputing and not self._schedule.suspended:
            if self._failure is not None:
                raise self._failure
            await asyncio.sleep(_POLL_S)
        return self._schedule.counters.recomputed_tokens - self._recomputed_before

    async def progress(self, since: Mapping[str, int]) -> dict[str, Sampled]:
        return {session: self._schedule.sampled_since(session, count) for session, count in since.items()}

    async def stats(self) -> EngineStats:
        return EngineStats(**self._counts())

    def _counts(self) -> dict[str, Any]:
        schedule, counters = self._schedule, self._schedule.counters
        return {
            "version": self._version,
            "running": schedule.running,
            "waiting": schedule.waiting,
            "sessions": schedule.sessions,
            "suspended": schedule.suspended,
            "prefill_tokens": counters.prefill_tokens,
            "recomputed_tokens": counters.recomputed_tokens,
            "decode_tokens": counters.decode_tokens,
            "cached_tokens": counters.cached_tokens,
            "steps": self._steps,
            "busy_seconds": self._busy_seconds,
            "kv_imported_tokens": counters.imported_tokens,
        }

    def _scheduled(self, request: GenerateRequest) -> Request:
        """What the schedule gets for a turn. Raises `RpcError` where it cannot run."""
        room = self._room(request)
        return Request(
            session=request.session,
            tokens=request.tokens,
            max_new_tokens=min(request.max_new_tokens, room),
            temperature=request.temperature,
            seed=request.seed,
            sampled_before=request.sampled_before,
        )

    def _room(self, request: GenerateRequest) -> int:
        if self._failure is not None:
            raise self._failure
        room = require_valid(request, self._vocabulary, self._schedule.max_context)
        if self._schedule.is_busy(request.session):
            raise session_busy(request.session)
        return room

    async def _run_request(self, scheduled: Request) -> Generation:
        self._schedule.submit(scheduled)
        future = asyncio.get_running_loop().create_future()
        self._futures[scheduled] = future
        self._wake.set()
        try:
            return await future
        except asyncio.CancelledError:
            if self._futures.pop(scheduled, None) is not None:
                self._schedule.abort([scheduled.session], StopReason.CANCELLED)
            raise

    async def _run(self) -> None:
        try:
            await self._iterate_for_ever()
        except Exception as error:
            logger.exception("the engine failed")
            self._fail(RpcError("engine_failed", f"{type(error).__name__}: {error}"))
            raise

    def _settle(self, finished: list[Finished]) -> None:
        for end in finished:
            future = self._futures.pop(end.request, None)
            if future is not None and not future.done():
                future.set_result(Generation(end.tokens, end.logprobs, end.versions, end.stop))

    def _fail(self, error: RpcError) -> None:
        self._failure = error
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
        self._futures.clear()
