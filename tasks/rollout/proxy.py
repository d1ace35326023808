"""The LLM proxy: the one door between environments and inference workers.

It routes each turn of a trajectory, holds new turns back while the engines take new weights, refuses turns of
trajectories that have become too old, and aborts trajectories on the control plane's word. It never looks
into the tokens.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from infra.rpc import ConnectionLost, RpcClient, RpcError
from tasks.rollout.routing import NoWorker, Router
from tasks.rollout.turn_gate import TurnGate, TurnRefused
from tasks.trajectory import StopReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineAddress:
    name: str
    url: str
    token: str | None = None
    pool: str = "default"


class LLMProxy:
    """Decisions are the router's; this class carries them out between connections."""

    def __init__(self, router: Router, generate_limit_s: float):
        self._router = router
        self._limit_s = generate_limit_s
        self._engines: dict[str, RpcClient] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._gate = TurnGate()
        self._version = 0
        self.turns = 0

    async def add_engine(self, address: EngineAddress) -> None:
        self._engines[address.name] = await RpcClient(address.url, token=address.token).connect()
        self._router.add_worker(address.name, address.pool)

    async def close(self) -> None:
        for engine in self._engines.values():
            await engine.close()

    async def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        """One turn, as the engine answers it.

        Raises `RpcError` with code `stale`, `cancelled`, `context_overflow` or `generation_failed`. A turn
        lost with its worker is generated again elsewhere from the same context.
        """
        trajectory: str = payload["trajectory"]
        request = {
            "session": trajectory,
            "tokens": payload["tokens"],
            "max_new_tokens": payload["max_new_tokens"],
            "temperature": payload["temperature"],
            "seed": payload["seed"],
        }
        while True:
            await self._open.wait()
            try:
                self._gate.check(trajectory, payload["initiating_version"])
            except TurnRefused as refusal:
                raise RpcError(refusal.reason, str(refusal)) from refusal
            try:
                name = self._router.route(trajectory, payload["domain"])
            except NoWorker as error:
                raise RpcError("generation_failed", str(error)) from error
            try:
                answer = await self._sample(name, request)
            except ConnectionLost as error:
                logger.warning("inference worker %s is gone: %s", name, error)
                self._router.set_aside(name)
                continue
            except TimeoutError as error:
                message = f"no answer in rollout.generate_limit_s ({self._limit_s} s)"
                raise RpcError("generation_failed", message) from error
            except RpcError as error:
                if error.code == "context_overflow":
                    raise
                if self._router.failed(name):
                    logger.error("inference worker %s is set aside after repeated failures", name)
                raise RpcError("generation_failed", f"{name}: {error}") from error
            self._router.succeeded(name)
            self.turns += 1
            return answer

    async def _sample(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """The turn's generation on one worker."""
        answer: dict[str, Any] = await self._engines[name].call("generate", request, self._limit_s)
        return answer

    async def finish(self, trajectories: list[str]) -> None:
        """These trajectories are over: their KV caches may go."""
        held: dict[str, list[str]] = {}
        self._gate.finish(trajectories)
        for trajectory in trajectories:
            name = self._router.release(trajectory)
            if name is not None and self._engines[name].connected:
                held.setdefault(name, []).append(trajectory)
        for name, sessions in held.items():
            await self._engines[name].call("end_sessions", {"sessions": sessions})

    async def abort(self, trajectories: list[str], reason: StopReason) -> None:
        """End these trajectories' running turns and refuse further ones."""
        self._gate.abort(trajectories, reason)
        await self._on_every_engine("abort", {"sessions": trajectories, "reason": reason.value})

    def set_oldest_admissible(self, version: int) -> None:
        """Refuse turns of trajectories begun before this version."""
        self._gate.set_oldest_admissible(version)

    async def suspend(self) -> None:
        """Hold new turns back and freeze the running ones; nothing is lost."""
        self._open.clear()
        await self._on_every_engine("suspend")

    async def load_weights(self, version: int) -> None:
        """Every worker takes the published version; returns once all have acknowledged it.

        A worker that cannot is set aside; with none left this raises `RpcError` of code `update_failed`.
        """
        names = self._available()
        answers = await asyncio.gather(
            *(self._engines[name].call("load_weights", {"version": version}) for name in names),
            return_exceptions=True,
        )
        problems = {}
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, BaseException):
                problems[name] = str(answer)
                self._router.set_aside(name)
                logger.error("inference worker %s did not take version %d: %s", name, version, answer)
        if len(problems) == len(names):
            raise RpcError("update_failed", f"no worker took version {version}: {problems}")
        self._version = version

    async def resume(self) -> None:
        await self._on_every_engine("resume")
        self._open.set()

    async def recompute(self) -> int:
        """Wait until the requests that were frozen at the last update have rebuilt their KV."""
        names = self._available()
        return sum(await asyncio.gather(*(self._engines[name].call("recompute") for name in names)))

    async def stats(self) -> dict[str, Any]:
        names = self._available()
        answers = await asyncio.gather(*(self._engines[name].call("stats") for name in names))
        return {
            "version": self._version,
            "turns": self.turns,
            "engines": dict(zip(names, answers, strict=True)),
        }

    def _available(self) -> list[str]:
        return [worker.name for worker in self._router.workers if worker.available]

    async def _on_every_engine(self, method: str, payload: Any = None) -> None:
        """A worker that is gone is set aside; the others go on."""
        names = self._available()
        answers = await asyncio.gather(
            *(self._engines[name].call(method, payload) for name in names), return_exceptions=True
        )
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, ConnectionLost):
                logger.warning("inference worker %s is gone: %s", name, answer)
                self._router.set_aside(name)
            elif isinstance(answer, BaseException):
                raise answer
