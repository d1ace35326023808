"""The embedded inference engine: continuous batching on the CPU, in one process, on one event loop."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infra.clock import now
from infra.rpc import RpcError
from tasks.rollout.config import TorchEngineConfig
from tasks.rollout.engines.attention import Rows
from tasks.rollout.engines.base import EngineStats, GenerateRequest, Generation, HeldKv, KvSource
from tasks.rollout.engines.batch_schedule import BatchSchedule
from tasks.rollout.engines.decoder import Decoder, DecoderWeights
from tasks.rollout.engines.kv_blocks import KvBlock, KvShape, pack_block, require_continues
from tasks.rollout.engines.kv_imports import ImportAborted, KvConnections, KvImports, pull_blocks
from tasks.rollout.engines.request_check import require_valid, session_busy
from tasks.rollout.engines.requests import Finished, Request, Sampled
from tasks.rollout.engines.sampling import SlotSampling
from tasks.trajectory import StopReason

logger = logging.getLogger(__name__)

LoadWeights = Callable[[int], Iterable[tuple[str, Tensor]]]

# A message takes these passes of the event loop from the socket to a handler's call of the engine: the socket
# is read, its reader wakes, the handler's task starts. With fewer, a request would wait out whole iterations.
_PASSES = 4
_POLL_S = 0.002


class TorchEngine:
    """`InferenceEngine` by a `Decoder`. An iteration runs on the event loop's own thread, and between two of
    them the loop serves everything else, so a command never waits for more than one iteration.

    Beside what the protocol says, `generate` raises `RpcError` with the codes `context_overflow` (no token
    fits after the context), `session_busy`, `invalid_request` and `engine_failed`; `load_weights` raises
    `not_suspended`, and whatever the loader or `WeightsMismatch` says.
    """

    def __init__(
        self,
        config: Any,
        weights: Iterable[tuple[str, Tensor]],
        *,
        settings: TorchEngineConfig,
        max_context: int,
        stop_tokens: Collection[int],
        load: LoadWeights,
        version: int = 0,
        dtype: torch.dtype = torch.float32,
    ):
        """`config` is the model's Hugging Face configuration, `weights` those of policy version `version`.

        `load` returns the weights of a published version; it is called in a thread.
        """
        slots = settings.max_sessions
        self._schedule = BatchSchedule(
            slots=slots,
            max_running=settings.max_running,
            max_batch_tokens=settings.max_batch_tokens,
            max_context=max_context,
            stop_tokens=stop_tokens,
        )
        self._decoder = Decoder(config, weights, slots=slots, max_context=max_context, dtype=dtype)
        self._sampling = SlotSampling(slots, max_context)
        self._imports = KvImports()
        self._kv_connections = KvConnections(settings.kv_limit_s)
        self._kv: dict[Request, list[KvBlock]] = {}  # that came with requests which have no slot yet
        self._exported_tokens = 0
        self._load = load
        self._version = version
        self._futures: dict[Request, asyncio.Future[Generation]] = {}
        self._changing_weights = asyncio.Lock()
        self._pulling = asyncio.Lock()
        self._pulled: tuple[int, DecoderWeights] | None = None  # a version that waits to be put in place
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._failure: RpcError | None = None
        self._recomputed_before = 0
        self._steps = 0
        self._busy_seconds = 0.0

    async def __aenter__(self) -> "TorchEngine":
        self._loop_task = asyncio.create_task(self._run(), name="torch-engine")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._loop_task is not None
        self._loop_task.cancel()
        await asyncio.wait([self._loop_task])
        self._fail(RpcError("engine_failed", "the engine was stopped"))
        self._imports.abort_all()
        await self._kv_connections.close()

    @property
    def kv_shape(self) -> KvShape:
        return self._decoder.kv_shape

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
        if request.kv is not None:
            try:
                self._kv[scheduled] = await self._fetch(request, request.kv)
            except ImportAborted as aborted:
                return Generation.of_nothing(aborted.reason)
            if self._failure is not None:
                raise self._failure
        return await self._run_request(scheduled)

    async def prefill(self, session: str, tokens: NDArray[np.int32]) -> HeldKv:
        held = tokens[:-1]
        if not len(held):
            raise RpcError("invalid_request", "a context of less than two tokens leaves nothing to prefill")
        self._check(GenerateRequest(session, tokens, max_new_tokens=1, temperature=0, seed=0))
        done = await self._run_request(
            Request(session, held, max_new_tokens=0, temperature=0, seed=0, samples=False)
        )
        if done.stop is not StopReason.LENGTH:
            raise RpcError("prefill_aborted", done.stop.value)
        return HeldKv(session, len(held), self._version)

    async def export_kv(self, key: str, start: int, count: int) -> dict[str, Any]:
        """`key` is a session, idle or not. It answers between two iterations, suspended or not."""
        slot, computed = self._schedule.computed(key)
        if not 0 <= start < computed or count < 1:
            raise RpcError(
                "kv_gone", f"of session {key!r}, KV of {computed} tokens is held, none from {start}"
            )
        count = min(count, computed - start)
        self._exported_tokens += count
        tokens = self._schedule.contexts[slot, start : start + count]
        return pack_block(KvBlock(self._version, start, tokens, self._decoder.cache.read(slot, start, count)))

    async def abort(self, sessions: list[str], reason: StopReason) -> None:
        self._imports.abort(sessions, reason)
        self._settle(self._schedule.abort(sessions, reason))

    async def end_session(self, session: str) -> None:
        """A request that the session still has ends as cancelled."""
        self._imports.abort([session], StopReason.CANCELLED)
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
            self._decoder.weights, self._pulled = self._pulled[1], None
            self._schedule.invalidate()
            self._recomputed_before = self._schedule.counters.recomputed_tokens
            self._version = version

    async def prefetch(self, version: int) -> None:
        async with self._pulling:
            self._pulled = None
            weights = await asyncio.to_thread(lambda: self._decoder.prepare(self._load(version)))
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
        schedule, counters = self._schedule, self._schedule.counters
        return EngineStats(
            version=self._version,
            running=schedule.running,
            waiting=schedule.waiting + self._imports.running,
            sessions=schedule.sessions,
            suspended=schedule.suspended,
            prefill_tokens=counters.prefill_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            decode_tokens=counters.decode_tokens,
            cached_tokens=counters.cached_tokens,
            steps=self._steps,
            busy_seconds=self._busy_seconds,
            kv_exported_tokens=self._exported_tokens,
            kv_imported_tokens=counters.imported_tokens,
        )

    async def _fetch(self, request: GenerateRequest, source: KvSource) -> list[KvBlock]:
        """What the source has of what is not cached here. Raises `ImportAborted`."""
        context = request.tokens
        lacking = range(self._schedule.cached(request.session, context), len(context) - 1)
        pull = pull_blocks(
            self._kv_connections,
            self.kv_shape,
            source,
            lacking,
            lambda block, start: require_continues(block, self._version, start, context),
        )
        return await self._imports.fetch(request.session, pull)

    async def _run_request(self, scheduled: Request) -> Generation:
        blocks = self._kv.get(scheduled)
        if blocks and all(block.version == self._version for block in blocks):
            scheduled.offered = range(blocks[0].start, blocks[-1].stop)
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
        finally:
            self._kv.pop(scheduled, None)

    def _check(self, request: GenerateRequest) -> int:
        if self._failure is not None:
            raise self._failure
        room = require_valid(request, self._decoder.shape.vocabulary, self._schedule.max_context)
        if self._schedule.is_busy(request.session) or self._imports.has(request.session):
            raise session_busy(request.session)
        return room

    async def _run(self) -> None:
        try:
            while True:
                while not self._schedule.has_work():
                    self._wake.clear()
                    await self._wake.wait()
                    await _let_others_run()
                began = now()
                self._step()
                await _let_others_run()
                self._busy_seconds += now() - began
        except Exception as error:
            logger.exception("the engine failed")
            self._fail(RpcError("engine_failed", f"{type(error).__name__}: {error}"))
            raise

    def _step(self) -> None:
        iteration = self._schedule.plan()
        if iteration is None:
            return
        for request in iteration.started:
            self._sampling.begin(
                request.slot,
                request.seed,
                request.temperature,
                request.max_new_tokens,
                first=request.sampled_before,
            )
            self._put_imported(request)
        rows = Rows(iteration.slots, iteration.starts, iteration.counts, iteration.sampled)
        logits = self._decoder.forward(rows, self._schedule.contexts)
        slots = iteration.slots[iteration.sampled]
        tokens, logprobs = self._sampling.sample(logits, slots, iteration.sample_index)
        self._steps += 1
        self._settle(self._schedule.complete(iteration, tokens, logprobs, self._version))

    def _put_imported(self, request: Request) -> None:
        wanted = request.imported
        for block in self._kv.pop(request, ()):
            first, end = max(block.start, wanted.start), min(block.stop, wanted.stop)
            if first < end:
                kv = block.kv[:, first - block.start : end - block.start]
                self._decoder.cache.write(request.slot, first, kv)

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


async def _let_others_run() -> None:
    for _ in range(_PASSES):
        await asyncio.sleep(0)
