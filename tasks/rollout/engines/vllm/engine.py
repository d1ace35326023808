"""vLLM behind the inference engine protocol: a server process of its own, driven over loopback HTTP.

Every token is stamped by vLLM's engine core itself: each step's outputs carry the label that the weights then
have, and the label changes only between a pause, which waits until no step is under way, and a resume.
"""

import asyncio
import itertools
import json
import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infra.clock import now
from infra.rpc import RpcError
from tasks.rollout.config import VllmEngineConfig
from tasks.rollout.engines.base import EngineStats, GenerateRequest, Generation, HeldKv
from tasks.rollout.engines.batch_schedule import Sampled
from tasks.rollout.engines.kv_imports import ImportAborted
from tasks.rollout.engines.request_check import require_valid, session_busy
from tasks.rollout.engines.vllm.client import VllmClient
from tasks.rollout.engines.vllm.kv_folders import remove
from tasks.rollout.engines.vllm.kv_handover import KvHandover
from tasks.rollout.engines.vllm.process import VllmProcess
from tasks.rollout.engines.vllm.settings import VllmServerSettings
from tasks.rollout.engines.vllm.wire import generation, sampled_so_far, token_request
from tasks.rollout.routing import WorkerRole
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
        role: WorkerRole = "both",
    ):
        """`model` is a directory in Hugging Face format with `vocabulary` token ids.

        `version` is a published one to serve, or None for the directory's weights as version 0.
        """
        settings.require_available()
        self._role = role
        self._kv = KvHandover(settings, shares=role != "both")
        self._prefills = 0
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
            self._kv.start()
            async with asyncio.timeout(self._settings.start_limit_s):
                self._process = await VllmProcess.start(
                    VllmServerSettings(
                        model=self._model,
                        max_context=self._max_context,
                        engine=self._settings,
                        token=self._token,
                        role=self._role,
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
        await self._kv.stop()
        if self._client is not None:
            await self._client.close()
        if self._process is not None:
            await self._process.stop()
        self._kv.remove_files()

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
        try:
            fetched = await self._kv.fetch(request, self._settled_version)
        except ImportAborted as aborted:
            return Generation.of_nothing(aborted.reason)
        try:
            count = min(request.max_new_tokens, room)
            answer, turn = await self._run_turn(request, count, fetched.parameters if fetched else None)
        finally:
            if fetched is not None:
                remove(fetched.folder)
        return generation(answer["choices"][0], turn.ended_by)

    async def prefill(self, session: str, tokens: NDArray[np.int32]) -> HeldKv:
        """Holds the KV of whole cache blocks only."""
        request = GenerateRequest(session, tokens, max_new_tokens=1, temperature=0, seed=0)
        self._check(request)
        with self._kv.room_to_save() as folder:
            answer, turn = await self._run_turn(request, 1, {"save": str(folder)})
            self._prefills += 1
            done = generation(answer["choices"][0], turn.ended_by)
            if not len(done.tokens):
                raise RpcError("prefill_aborted", done.stop.value)
            saved = int(answer["kv_transfer_params"]["saved"])
            return await self._kv.hold(session, folder, tokens[:saved], int(done.versions[0]))

    async def export_kv(self, key: str, start: int, count: int) -> dict[str, Any]:
        """`start` and `count` are of bytes."""
        return await asyncio.to_thread(self._kv.export, key, start, count)

    async def abort(self, sessions: list[str], reason: StopReason) -> None:
        """Returns once their requests have ended."""
        self._kv.abort(sessions, reason)
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
        self._kv.forget(session)

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

    async def check(self) -> None:
        await self._server.healthy()

    async def progress(self, since: Mapping[str, int]) -> dict[str, Sampled]:
        turns = {name: self._turns[name].id for name in since if name in self._turns}
        found = await self._server.sampled({turns[name]: since[name] for name in turns}) if turns else {}
        sampled = {
            name: sampled_so_far(found[turn], since[name]) for name, turn in turns.items() if turn in found
        }
        return {name: each for name, each in sampled.items() if each is not None}

    async def stats(self) -> EngineStats:
        metrics = await self._server.metrics()
        in_flight = len(self._turns)
        # vLLM updates its gauges when it steps, so they stand still while it is paused.
        running = min(in_flight, int(metrics["vllm:num_requests_running"]))
        imported = int(metrics.get("vllm:external_prefix_cache_hits_total", 0))
        cached = int(metrics["vllm:prompt_tokens_cached_total"])
        self._count_busy()
        return EngineStats(
            version=self._version,
            running=running,
            waiting=in_flight - running + self._kv.fetching,
            sessions=len(self._sessions),
            suspended=self._suspended,
            prefill_tokens=int(metrics["vllm:prompt_tokens_total"]) - cached + self._recomputed_tokens,
            recomputed_tokens=self._recomputed_tokens,
            decode_tokens=max(0, int(metrics["vllm:generation_tokens_total"]) - self._prefills),
            cached_tokens=cached - imported,
            steps=int(metrics["vllm:iteration_tokens_total_count"]),
            busy_seconds=self._busy_seconds,
            kv_exported_tokens=self._kv.exported_tokens,
            kv_imported_tokens=imported,
        )

    async def _run_turn(
        self, request: GenerateRequest, count: int, kv: dict[str, Any] | None
    ) -> tuple[dict[str, Any], _Turn]:
        turn = _Turn(f"turn-{next(self._ids)}", len(request.tokens))
        self._turns[request.session] = turn
        self._sessions.add(request.session)
        self._count_busy()
        try:
            asked = token_request(turn.id, request, count, self._stop_tokens)
            return await self._server.generate({**asked, "kv_transfer_params": kv} if kv else asked), turn
        finally:
            del self._turns[request.session]
            self._count_busy()

    def _settled_version(self) -> int | None:
        return None if self._changing_weights.locked() else self._version

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
            self._kv.clear()
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
        room = require_valid(request, self._vocabulary, self._max_context)
        if request.session in self._turns or self._kv.is_fetching(request.session):
            raise session_busy(request.session)
        return room
