"""vLLM behind the inference engine protocol: a server process of its own, driven over loopback HTTP.

Every token is stamped by vLLM's engine core itself: each step's outputs carry the label that the weights then
have, and the label changes only between a pause, which waits until no step is under way, and a resume.
"""

import asyncio
import itertools
import json
import logging
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.clock import now
from infra.rpc import RpcError
from tasks.rollout.config import VllmEngineConfig
from tasks.rollout.engines.base import EngineStats, GenerateRequest, Generation
from tasks.rollout.engines.vllm.client import VllmClient
from tasks.rollout.engines.vllm.process import VllmProcess
from tasks.rollout.engines.vllm.settings import VllmServerSettings
from tasks.rollout.engines.vllm.wire import generation, token_request
from tasks.trajectory import StopReason

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_START_POLL_S = 0.2


@dataclass(eq=False, slots=True)
class _Turn:
    """A request in flight."""

    id: str
    context: int  # tokens
    ended_by: StopReason = StopReason.CANCELLED  # why, if it is aborted


@dataclass(frozen=True, slots=True)
class _Frozen:
    """A request whose KV an update made stale."""

    turn: _Turn
    sampled: int  # tokens, at the update

    @property
    def cached(self) -> int:
        """Tokens whose KV it had: all but the last sampled one."""
        return self.turn.context + self.sampled - 1


class VllmEngine:
    """`InferenceEngine` by a vLLM server.

    KV caches belong to vLLM, which keeps what it has room for and shares equal prefixes, so `end_session`
    frees nothing, and `stats().sessions` counts trajectories that have generated and not ended. `generate`
    raises `RpcError` with the codes of the embedded engine: `context_overflow`, `session_busy`,
    `invalid_request` and `engine_failed`; `load_weights` raises `not_suspended` or `weights_rejected`.

    A draw is determined by the request's seed and the number of tokens sampled before; what the draw selects
    also depends on the logits, which vary in their last bits with the batch that vLLM computes them in.
    """

    def __init__(
        self,
        *,
        settings: VllmEngineConfig,
        model: Path,
        max_context: int,
        vocabulary: int,
        stop_tokens: Collection[int],
        weights_url: str,
        weights_options: dict[str, Any],
        version: int | None = None,
    ):
        """`model` is a directory in Hugging Face format with `vocabulary` token ids.

        `version` is a published one to serve, or None for the directory's weights as version 0.
        """
        settings.require_available()
        self._settings = settings
        self._model = model
        self._max_context = max_context
        self._vocabulary = vocabulary
        self._stop_tokens = sorted(stop_tokens)
        self._weights = {"url": weights_url, "options": weights_options}
        self._first_version = version
        self._version = 0
        self._turns: dict[str, _Turn] = {}
        self._sessions: set[str] = set()
        self._ids = itertools.count()
        self._suspended = False
        self._changing_weights = asyncio.Lock()
        self._stale: list[_Frozen] = []  # at the update, until generation goes on
        self._frozen: list[_Frozen] = []  # those of them that compute their KV again
        self._recomputed_tokens = 0
        self._recomputed_before = 0
        self._busy_seconds = 0.0
        self._busy_since: float | None = None
        self._token = secrets.token_urlsafe(24)
        self._process: VllmProcess | None = None
        self._client: VllmClient | None = None

    async def __aenter__(self) -> "VllmEngine":
        """Returns once the model is loaded. Raises `RpcError` of code `engine_failed`, or TimeoutError."""
        interpreter = self._settings.interpreter
        assert interpreter is not None
        try:
            async with asyncio.timeout(self._settings.start_limit_s):
                self._process = await VllmProcess.start(
                    VllmServerSettings(
                        model=self._model,
                        max_context=self._max_context,
                        engine=self._settings,
                        token=self._token,
                    ),
                    interpreter,
                )
                self._client = VllmClient(self._process.url, self._token)
                await self._until_healthy(self._process, self._client)
                if self._first_version is None:
                    await self._client.set_version(0)
                else:
                    await self._take(self._first_version)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.close()
        if self._process is not None:
            await self._process.stop()

    @property
    def address(self) -> tuple[str, str]:
        """URL of the running vLLM server and its bearer token, for whoever inspects or measures it."""
        assert self._process is not None
        return self._process.url, self._token

    async def wait_failed(self) -> None:
        """Raises once the server has ended."""
        assert self._process is not None
        raise RpcError("engine_failed", await self._process.wait())

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples fewer than `max_new_tokens` where the context ends first; the stop is then LENGTH."""
        room = self._check(request)
        turn = _Turn(f"turn-{next(self._ids)}", len(request.tokens))
        self._turns[request.session] = turn
        self._sessions.add(request.session)
        self._count_busy()
        try:
            choice = await self._server.generate(
                token_request(turn.id, request, min(request.max_new_tokens, room), self._stop_tokens)
            )
        finally:
            del self._turns[request.session]
            self._count_busy()
        return generation(choice, turn.ended_by)

    async def abort(self, sessions: list[str], reason: StopReason) -> None:
        """Returns once their requests have ended."""
        turns = [self._turns[session] for session in sessions if session in self._turns]
        for turn in turns:
            turn.ended_by = reason
        while self._server_runs and (left := self._in_flight(turns)):
            # Again, until it is gone: vLLM does not know a request that is still on its way to it.
            await self._server.abort([turn.id for turn in left])
            await asyncio.sleep(_POLL_S)

    async def end_session(self, session: str) -> None:
        """A request that the session still has ends as cancelled."""
        await self.abort([session], StopReason.CANCELLED)
        self._sessions.discard(session)

    async def suspend(self) -> None:
        await self._server.pause()
        self._suspended = True
        self._count_busy()

    async def load_weights(self, version: int) -> None:
        async with self._changing_weights:
            if not self._suspended:
                raise RpcError("not_suspended", "weights are replaced only while the engine is suspended")
            await self._take(version)
            sampled = await self._server.progress()
            counts = [(turn, sampled.get(turn.id, 0)) for turn in self._turns.values()]
            self._stale = [_Frozen(turn, count) for turn, count in counts if count > 0]
            self._recomputed_before = self._recomputed_tokens

    async def resume(self) -> None:
        async with self._changing_weights:
            if self._stale:
                self._frozen = [each for each in self._stale if self._in_flight([each.turn])]
                self._recomputed_tokens += sum(each.cached for each in self._frozen)
                self._stale = []
            await self._server.resume()
            self._suspended = False
            self._count_busy()

    async def recompute(self) -> int:
        """A request has rebuilt its KV when it has sampled its next token, or ended.

        Prefixes that several requests share are computed once and counted once a request.
        """
        waiting = self._frozen
        while waiting and not self._suspended:
            sampled = await self._server.progress()
            waiting = [
                each
                for each in waiting
                if self._in_flight([each.turn]) and sampled.get(each.turn.id, 0) <= each.sampled
            ]
            if waiting:
                await asyncio.sleep(_POLL_S)
        if not self._suspended:
            self._frozen = []
        return self._recomputed_tokens - self._recomputed_before

    async def stats(self) -> EngineStats:
        metrics = await self._server.metrics()
        in_flight = len(self._turns)
        # vLLM updates its gauges when it steps, so they stand still while it is paused.
        running = min(in_flight, int(metrics["vllm:num_requests_running"]))
        cached = int(metrics["vllm:prompt_tokens_cached_total"])
        self._count_busy()
        return EngineStats(
            version=self._version,
            running=running,
            waiting=in_flight - running,
            sessions=len(self._sessions),
            suspended=self._suspended,
            prefill_tokens=int(metrics["vllm:prompt_tokens_total"]) - cached + self._recomputed_tokens,
            recomputed_tokens=self._recomputed_tokens,
            decode_tokens=int(metrics["vllm:generation_tokens_total"]),
            cached_tokens=cached,
            steps=int(metrics["vllm:iteration_tokens_total_count"]),
            busy_seconds=self._busy_seconds,
        )

    @property
    def _server(self) -> VllmClient:
        if self._client is None or not self._server_runs:
            raise RpcError("engine_failed", "the vLLM server has ended")
        return self._client

    @property
    def _server_runs(self) -> bool:
        return self._process is not None and self._process.running

    async def _until_healthy(self, process: VllmProcess, client: VllmClient) -> None:
        while not await client.healthy():
            if not process.running:
                raise RpcError("engine_failed", await process.wait())
            await asyncio.sleep(_START_POLL_S)

    async def _take(self, version: int) -> None:
        """Have every worker take a published version, or none; nothing may be running meanwhile."""
        request = json.dumps({**self._weights, "version": version})
        answers = await self._server.on_workers("tutti_fetch_weights", request)
        rejected = [answer["rejected"] for answer in answers if "rejected" in answer]
        if rejected:
            await self._server.on_workers("tutti_drop_weights")
            raise RpcError("weights_rejected", rejected[0])
        try:
            await self._server.on_workers("tutti_swap_weights")
            await self._server.reset_kv()
            await self._server.set_version(version)
        except RpcError:
            # Weights that are half replaced, or KV of others, must not sample another token.
            assert self._process is not None
            await self._process.stop()
            raise
        self._version = version

    def _in_flight(self, turns: Sequence[_Turn]) -> list[_Turn]:
        present = set(self._turns.values())
        return [turn for turn in turns if turn in present]

    def _count_busy(self) -> None:
        moment = now()
        if self._busy_since is not None:
            self._busy_seconds += moment - self._busy_since
        self._busy_since = moment if self._turns and not self._suspended else None

    def _check(self, request: GenerateRequest) -> int:
        tokens = request.tokens
        if not len(tokens) or request.max_new_tokens < 1 or not request.temperature >= 0:
            raise RpcError(
                "invalid_request",
                f"{len(tokens)} tokens, max_new_tokens {request.max_new_tokens}, temperature "
                f"{request.temperature}: there must be a token, a token to sample, no negative temperature",
            )
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            raise RpcError("invalid_request", f"a token id is outside the vocabulary of {self._vocabulary}")
        room = self._max_context - len(tokens)
        if room < 1:
            raise RpcError(
                "context_overflow",
                f"{len(tokens)} tokens leave no room in a context of {self._max_context}: lower the "
                "domain's max_tokens, or raise the model's context",
            )
        if request.session in self._turns:
            raise RpcError("session_busy", f"session {request.session!r} has a request already")
        return room
