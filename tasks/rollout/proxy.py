"""The LLM proxy: the one door between environments and inference workers.

It routes each turn of a trajectory, holds new turns back while the engines take new weights, refuses turns of
trajectories that have become too old, and aborts trajectories on the control plane's word. It never looks
into the tokens.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from infra.rpc import ConnectionLost, RpcClient, RpcConnection, RpcError, RpcServer
from tasks.rollout.routing import NoWorker, Router
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
        self._aborted: dict[str, str] = {}  # trajectory -> reason, until it is finished
        self._oldest_admissible = 0
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
            self._refuse_if_over(trajectory, payload["initiating_version"])
            try:
                name = self._router.route(trajectory, payload["domain"])
            except NoWorker as error:
                raise RpcError("generation_failed", str(error)) from error
            try:
                answer: dict[str, Any] = await self._engines[name].call("generate", request, self._limit_s)
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

    def _refuse_if_over(self, trajectory: str, initiating_version: int | None) -> None:
        reason = self._aborted.get(trajectory)
        if reason is not None:
            raise RpcError(reason, f"{trajectory} was aborted")
        if initiating_version is not None and initiating_version < self._oldest_admissible:
            raise RpcError(StopReason.STALE, f"{trajectory} began at version {initiating_version}")

    async def finish(self, trajectories: list[str]) -> None:
        """These trajectories are over: their KV caches may go."""
        held: dict[str, list[str]] = {}
        for trajectory in trajectories:
            self._aborted.pop(trajectory, None)
            name = self._router.release(trajectory)
            if name is not None and self._engines[name].connected:
                held.setdefault(name, []).append(trajectory)
        for name, sessions in held.items():
            await self._engines[name].call("end_sessions", {"sessions": sessions})

    async def abort(self, trajectories: list[str], reason: StopReason) -> None:
        """End these trajectories' running turns and refuse further ones."""
        self._aborted.update(dict.fromkeys(trajectories, reason.value))
        await self._on_every_engine("abort", {"sessions": trajectories, "reason": reason.value})

    def set_oldest_admissible(self, version: int) -> None:
        """Refuse turns of trajectories begun before this version."""
        self._oldest_admissible = version

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


async def serve_proxy(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """The proxy's process. Settings: engines (`EngineAddress` fields), pools, generate_limit_s, token.

    Raises ValueError without a token: the proxy asks for one on loopback too.
    """
    if not settings.get("token"):
        raise ValueError("the proxy's settings need a token")
    pools: Mapping[str, str] = settings.get("pools", {})
    proxy = LLMProxy(Router(pools), settings["generate_limit_s"])
    for address in settings["engines"]:
        await proxy.add_engine(EngineAddress(**address))

    async def generate(payload: Any, _: RpcConnection) -> Any:
        return await proxy.generate(payload)

    async def finish(payload: Any, _: RpcConnection) -> None:
        await proxy.finish(payload["trajectories"])

    async def abort(payload: Any, _: RpcConnection) -> None:
        await server.broadcast("abort", payload)
        await proxy.abort(payload["trajectories"], StopReason(payload["reason"]))

    async def set_oldest_admissible(payload: Any, _: RpcConnection) -> None:
        proxy.set_oldest_admissible(payload["version"])

    async def suspend(_: Any, __: RpcConnection) -> None:
        await proxy.suspend()

    async def load_weights(payload: Any, _: RpcConnection) -> None:
        await proxy.load_weights(payload["version"])

    async def resume(_: Any, __: RpcConnection) -> None:
        await proxy.resume()

    async def recompute(_: Any, __: RpcConnection) -> int:
        return await proxy.recompute()

    async def stats(_: Any, __: RpcConnection) -> dict[str, Any]:
        return await proxy.stats()

    handlers = (
        generate,
        finish,
        abort,
        set_oldest_admissible,
        suspend,
        load_weights,
        resume,
        recompute,
        stats,
    )
    server = RpcServer({handler.__name__: handler for handler in handlers}, token=settings["token"])
    url = await server.start(settings.get("host", "127.0.0.1"), settings.get("port", 0))
    ready({"url": url})
    await asyncio.Event().wait()


if __name__ == "__main__":
    from infra.processes import serve

    logging.basicConfig(level=logging.INFO)
    serve(serve_proxy)
