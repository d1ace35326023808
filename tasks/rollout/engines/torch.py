"""The embedded inference engine: continuous batching on the CPU, in one process, on one event loop."""

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infra.clock import now
from infra.rpc import RpcError
from tasks.rollout.config import TorchEngineConfig
from tasks.rollout.engines.attention import Rows
from tasks.rollout.engines.base import GenerateRequest, Generation, HeldKv, KvSource
from tasks.rollout.engines.batch_schedule import BatchSchedule
from tasks.rollout.engines.batching import BatchingEngine
from tasks.rollout.engines.decoder import Decoder, DecoderWeights
from tasks.rollout.engines.kv_blocks import KvBlock, KvShape, pack_block, require_continues
from tasks.rollout.engines.kv_imports import ImportAborted, KvConnections, KvImports, pull_blocks
from tasks.rollout.engines.request_check import session_busy
from tasks.rollout.engines.requests import Request
from tasks.rollout.engines.sampling import SlotSampling
from tasks.trajectory import StopReason

LoadWeights = Callable[[int], Iterable[tuple[str, Tensor]]]

# A message takes these passes of the event loop from the socket to a handler's call of the engine: the socket
# is read, its reader wakes, the handler's task starts. With fewer, a request would wait out whole iterations.
_PASSES = 4


class TorchEngine(BatchingEngine[DecoderWeights]):
    """By a `Decoder`. An iteration runs on the event loop's own thread, and between two of them the loop
    serves everything else, so a command never waits for more than one iteration."""

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

        `load` returns the weights of a published version; it is called in a thread. What it or
        `WeightsMismatch` says is what pulling a version raises.
        """
        slots = settings.max_sessions
        schedule = BatchSchedule(
            slots=slots,
            max_running=settings.max_running,
            max_batch_tokens=settings.max_batch_tokens,
            max_context=max_context,
            stop_tokens=stop_tokens,
        )
        self._decoder = Decoder(config, weights, slots=slots, max_context=max_context, dtype=dtype)
        super().__init__(schedule, vocabulary=self._decoder.shape.vocabulary, version=version)
        self._sampling = SlotSampling(slots, max_context)
        self._imports = KvImports()
        self._kv_connections = KvConnections(settings.kv_limit_s)
        self._kv: dict[Request, list[KvBlock]] = {}  # that came with requests which have no slot yet
        self._exported_tokens = 0
        self._load = load

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        self._imports.abort_all()
        await self._kv_connections.close()

    @property
    def kv_shape(self) -> KvShape:
        return self._decoder.kv_shape

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples fewer than `max_new_tokens` where the context ends first; the stop is then LENGTH."""
        scheduled = self._scheduled(request)
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
        self._room(GenerateRequest(session, tokens, max_new_tokens=1, temperature=0, seed=0))
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
        await super().abort(sessions, reason)

    async def end_session(self, session: str) -> None:
        self._imports.abort([session], StopReason.CANCELLED)
        await super().end_session(session)

    def _counts(self) -> dict[str, Any]:
        counts = super()._counts()
        counts["waiting"] += self._imports.running
        return {**counts, "kv_exported_tokens": self._exported_tokens}

    async def _pull(self, version: int) -> DecoderWeights:
        return await asyncio.to_thread(lambda: self._decoder.prepare(self._load(version)))

    async def _put_in_place(self, weights: DecoderWeights) -> None:
        self._decoder.weights = weights

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
        try:
            return await super()._run_request(scheduled)
        finally:
            self._kv.pop(scheduled, None)

    def _room(self, request: GenerateRequest) -> int:
        room = super()._room(request)
        if self._imports.has(request.session):
            raise session_busy(request.session)
        return room

    async def _iterate_for_ever(self) -> None:
        while True:
            while not self._schedule.has_work():
                self._wake.clear()
                await self._wake.wait()
                await _let_others_run()
            began = now()
            self._step()
            await _let_others_run()
            self._busy_seconds += now() - began

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


async def _let_others_run() -> None:
    for _ in range(_PASSES):
        await asyncio.sleep(0)
