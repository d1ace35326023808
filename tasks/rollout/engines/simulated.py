"""An inference engine without a model: the batching of the embedded engine, with injected durations.

What an iteration takes is slept on the event loop, so a few of these show on one machine, or on a
virtual-time event loop, what a fleet of real ones would do. Tokens come from the requests' seeds.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from infra.clock import now
from infra.rpc import RpcError
from tasks.rollout.config import SimulatedEngineConfig
from tasks.rollout.engines.base import EngineStats, GenerateRequest, Generation
from tasks.rollout.engines.batch_schedule import BatchSchedule, Finished, Iteration, Request, Sampled
from tasks.rollout.engines.sampling import draws
from tasks.trajectory import StopReason

logger = logging.getLogger(__name__)

_POLL_S = 0.002
_GATHER_S = 0.001


class SimulatedPolicy:
    """Ends a turn with a probability that depends on the tokens sampled so far, and otherwise samples any
    other token with equal probability. It is the same at every temperature and policy version."""

    def __init__(
        self, settings: SimulatedEngineConfig, vocabulary: int, stop_tokens: Collection[int], longest: int
    ):
        """Raises ValueError where no token is left beside the stop tokens."""
        self._end = min(stop_tokens)
        self._others = np.setdiff1d(np.arange(vocabulary, dtype=np.int32), list(stop_tokens))
        if not len(self._others):
            raise ValueError(f"a vocabulary of {vocabulary} has stop tokens only")
        self._end_probability = end_probabilities(settings, longest)

    def sample(
        self, uniform: NDArray[np.float64], indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Tokens and log-probabilities; row r is token `indices[r]` of its turn, drawn at `uniform[r]`."""
        ends_with = self._end_probability[indices]
        ended = uniform < ends_with
        goes_on = np.where(ended, 1.0, 1.0 - ends_with)
        place = ((uniform - ends_with) / goes_on * len(self._others)).astype(np.int64)
        tokens = np.where(ended, self._end, self._others[place.clip(0, len(self._others) - 1)])
        logprobs = np.log(np.where(ended, ends_with, goes_on / len(self._others)))
        return tokens.astype(np.int32), logprobs.astype(np.float32)


def end_probabilities(settings: SimulatedEngineConfig, longest: int) -> NDArray[np.float64]:
    """Of each of `longest` tokens of a turn: that it is the end token, given that none before it was.

    With `median_tokens` the length of a turn, end token included, is a log-normal one rounded up: the hazard
    P(L = k) / P(L >= k) of that distribution.
    """
    if settings.median_tokens is None:
        return np.full(longest, settings.end_probability)
    scale = settings.tokens_sigma * math.sqrt(2)
    beyond = [1.0] + [
        0.5 * math.erfc(math.log(length / settings.median_tokens) / scale) for length in range(1, longest + 1)
    ]
    return np.array(
        [1.0 - after / before if before > 0 else 1.0 for before, after in itertools.pairwise(beyond)]
    )


class SimulatedEngine:
    """`InferenceEngine` by a `SimulatedPolicy`. An iteration takes `prefill_s_per_token` for each token of
    context computed, `decode_s`, and `decode_s_per_sequence` for each row that samples.

    Beside what the protocol says, `generate` raises `RpcError` with the codes `context_overflow`,
    `session_busy`, `invalid_request` and `engine_failed`, as the embedded engine does; `load_weights` raises
    `not_suspended`, and what `require_published` says.
    """

    def __init__(
        self,
        *,
        settings: SimulatedEngineConfig,
        vocabulary: int,
        stop_tokens: Collection[int],
        max_context: int,
        require_published: Callable[[int], object],
        version: int = 0,
    ):
        """`require_published` raises where the version it is given is not in the weight store."""
        slots = settings.max_sessions
        self._settings = settings
        self._vocabulary = vocabulary
        self._schedule = BatchSchedule(
            slots=slots,
            max_running=settings.max_running,
            max_batch_tokens=settings.max_batch_tokens,
            max_context=max_context,
            stop_tokens=stop_tokens,
        )
        self._policy = SimulatedPolicy(settings, vocabulary, stop_tokens, max_context)
        self._draws = np.zeros((slots, max_context))
        self._sampled_before = np.zeros(slots, np.int64)
        self._require_published = require_published
        self._version = version
        self._futures: dict[Request, asyncio.Future[Generation]] = {}
        self._changing_weights = asyncio.Lock()
        self._pulling = asyncio.Lock()
        self._pulled: int | None = None  # a version that waits to be put in place
        self._wake = asyncio.Event()
        self._between_iterations = asyncio.Event()
        self._between_iterations.set()
        self._loop_task: asyncio.Task[None] | None = None
        self._failure: RpcError | None = None
        self._recomputed_before = 0
        self._steps = 0
        self._busy_seconds = 0.0

    async def __aenter__(self) -> "SimulatedEngine":
        self._loop_task = asyncio.create_task(self._run(), name="simulated-engine")
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
        room = self._check(request)
        scheduled = Request(
            session=request.session,
            tokens=request.tokens,
            max_new_tokens=min(request.max_new_tokens, room),
            temperature=request.temperature,
            seed=request.seed,
            sampled_before=request.sampled_before,
        )
        self._schedule.submit(scheduled)
        future = asyncio.get_running_loop().create_future()
        self._futures[scheduled] = future
        self._wake.set()
        try:
            return await future
        except asyncio.CancelledError:
            if self._futures.pop(scheduled, None) is not None:
                self._schedule.abort([request.session], StopReason.CANCELLED)
            raise

    async def abort(self, sessions: list[str], reason: StopReason) -> None:
        self._settle(self._schedule.abort(sessions, reason))

    async def end_session(self, session: str) -> None:
        """A request that the session still has ends as cancelled."""
        self._settle(self._schedule.end_session(session))

    async def suspend(self) -> None:
        """Returns once the iteration under way is over."""
        self._schedule.suspend()
        await self._between_iterations.wait()

    async def load_weights(self, version: int) -> None:
        async with self._changing_weights:
            if not self._schedule.suspended:
                raise RpcError("not_suspended", "weights are replaced only while the engine is suspended")
            if self._pulled != version:
                await self.prefetch(version)
            self._pulled = None
            await asyncio.sleep(self._settings.update_s)
            self._schedule.invalidate()
            self._recomputed_before = self._schedule.counters.recomputed_tokens
            self._version = version

    async def prefetch(self, version: int) -> None:
        """`pull_s` beside generation."""
        async with self._pulling:
            self._pulled = None
            self._require_published(version)
            await asyncio.sleep(self._settings.pull_s)
            self._pulled = version

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
        schedule, counters = self._schedule, self._schedule.counters
        return EngineStats(
            version=self._version,
            running=schedule.running,
            waiting=schedule.waiting,
            sessions=schedule.sessions,
            suspended=schedule.suspended,
            prefill_tokens=counters.prefill_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            decode_tokens=counters.decode_tokens,
            cached_tokens=counters.cached_tokens,
            steps=self._steps,
            busy_seconds=self._busy_seconds,
        )

    def _check(self, request: GenerateRequest) -> int:
        if self._failure is not None:
            raise self._failure
        tokens = request.tokens
        if not len(tokens) or request.max_new_tokens < 1 or not request.temperature >= 0:
            raise RpcError(
                "invalid_request",
                f"{len(tokens)} tokens, max_new_tokens {request.max_new_tokens}, temperature "
                f"{request.temperature}: there must be a token, a token to sample, no negative temperature",
            )
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            raise RpcError("invalid_request", f"a token id is outside the vocabulary of {self._vocabulary}")
        room = self._schedule.room(len(tokens))
        if room < 1:
            raise RpcError(
                "context_overflow",
                f"{len(tokens)} tokens leave no room in a context of {self._schedule.max_context}: lower the "
                "domain's max_tokens, or raise the model's context",
            )
        if self._schedule.is_busy(request.session):
            raise RpcError("session_busy", f"session {request.session!r} has a request already")
        return room

    async def _run(self) -> None:
        try:
            while True:
                began = now()
                while self._schedule.has_work():
                    began = await self._iterate(began)
                self._wake.clear()
                await self._wake.wait()
                # Requests that are sent together run together: their messages take a few passes to be read.
                await asyncio.sleep(_GATHER_S)
        except Exception as error:
            logger.exception("the engine failed")
            self._fail(RpcError("engine_failed", f"{type(error).__name__}: {error}"))
            raise

    async def _iterate(self, began: float) -> float:
        """One iteration from `began`, the end of the one before or the arrival of work; returns its end.

        Sleeping until the end, and not for the duration, keeps a timer's rounding from adding up.
        """
        iteration = self._schedule.plan()
        assert iteration is not None
        ends = began + self._duration(iteration)
        finished = self._sampled(iteration)
        self._between_iterations.clear()
        try:
            await asyncio.sleep(max(0.0, ends - now()))
        finally:
            self._between_iterations.set()
        self._steps += 1
        self._busy_seconds += ends - began
        self._settle(finished)
        return ends

    def _sampled(self, iteration: Iteration) -> list[Finished]:
        """What the iteration samples. The schedule learns of it at once, since it hears no event between an
        iteration and its completion; callers are answered when the iteration's time is over."""
        for request in iteration.started:
            first, count = request.sampled_before, request.max_new_tokens
            self._draws[request.slot, :count] = draws(request.seed, first + count)[first:]
            self._sampled_before[request.slot] = first
        slots, index = iteration.slots[iteration.sampled], iteration.sample_index
        tokens, logprobs = self._policy.sample(self._draws[slots, index], self._sampled_before[slots] + index)
        return self._schedule.complete(iteration, tokens, logprobs, self._version)

    def _duration(self, iteration: Iteration) -> float:
        settings = self._settings
        sampled = len(iteration.sample_index)
        decoded = int(((iteration.sample_index > 0) & (iteration.counts[iteration.sampled] == 1)).sum())
        prefilled = int(iteration.counts.sum()) - decoded
        return (
            settings.decode_s
            + settings.decode_s_per_sequence * sampled
            + settings.prefill_s_per_token * prefilled
        )

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
