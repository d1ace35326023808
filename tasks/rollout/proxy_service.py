"""The proxy's process: `LLMProxy` over RPC, and Prometheus metrics at GET /metrics."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from aiohttp import web

from infra.rpc import RpcConnection, RpcError, RpcServer
from tasks.rollout.lockstep import Lockstep
from tasks.rollout.proxy import LLMProxy
from tasks.rollout.proxy_metrics import metrics_route
from tasks.rollout.routing import Router
from tasks.rollout.worker_life import WorkerPhase
from tasks.rollout.workers import EngineAddress, WorkerLimits
from tasks.trajectory import StopReason

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ProxyState:
    """What a proxy that is started again must know of the one before it."""

    version: int = 0
    suspended: bool = False
    oldest_admissible: int = 0
    aborted: dict[str, str] = field(default_factory=dict)
    """Stop reason of each trajectory that the control plane aborted."""
    restarting: list[str] = field(default_factory=list)
    """Workers, among `engines`, that will join later."""


async def serve_proxy(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """The proxy's process. Settings: engines (`EngineAddress` fields), generate_limit_s, token; and where
    they are wanted affinity and fall_backs (of `Router`), limits (`WorkerLimits` fields), lockstep, and
    state (`ProxyState` fields), of a proxy before this one unless `first`.

    Raises ValueError without a token: the proxy asks for one on loopback too.
    """
    if not settings.get("token"):
        raise ValueError("the proxy's settings need a token")
    state = ProxyState(**settings.get("state", {}))
    first = settings.get("first", "state" not in settings)
    proxy = LLMProxy(
        Router(settings.get("affinity"), fall_backs=settings.get("fall_backs")),
        settings["generate_limit_s"],
        limits=WorkerLimits(**settings.get("limits", {})),
        version=state.version,
        suspended=state.suspended,
        lockstep=Lockstep() if settings.get("lockstep") else None,
        min_prefill_tokens=settings.get("min_prefill_tokens", 128),
    )
    proxy.set_oldest_admissible(state.oldest_admissible)
    for trajectory, reason in state.aborted.items():
        proxy.gate.abort([trajectory], StopReason(reason))
    addresses = [EngineAddress(**address) for address in settings["engines"]]
    joining: list[asyncio.Task[None]] = []
    for address in addresses:
        if first:
            await proxy.add_engine(address)
        elif address.name in state.restarting:
            proxy.workers.expect(address, WorkerPhase.RESTARTING)
        else:
            proxy.workers.expect(address)
            joining.append(asyncio.create_task(_rejoin(proxy, address)))

    server = RpcServer(
        proxy_handlers(proxy, lambda payload: server.broadcast("abort", payload)),
        token=settings["token"],
        extra_routes=[web.get("/metrics", metrics_route(proxy))],
    )
    url = await server.start(settings.get("host", "127.0.0.1"), settings.get("port", 0))
    ready({"url": url})
    try:
        await asyncio.gather(*joining)
        await asyncio.Event().wait()
    finally:
        proxy.workers.leave()


async def _rejoin(proxy: LLMProxy, address: EngineAddress) -> None:
    """A worker of the proxy before this one: what it still ran has ended with that one's connection."""
    try:
        await proxy.updates.join(address)
    except (RpcError, TimeoutError) as error:
        proxy.workers.lost(address.name, f"it did not join the new proxy: {error}")


def proxy_handlers(proxy: LLMProxy, announce_abort: Callable[[Mapping[str, Any]], Any]) -> dict[str, Any]:
    async def generate(payload: Any, _: RpcConnection) -> Any:
        return await proxy.generate(payload)

    async def finish(payload: Any, _: RpcConnection) -> None:
        await proxy.finish(payload["trajectories"])

    async def expect(payload: Any, _: RpcConnection) -> None:
        proxy.expect(payload["trajectories"])

    async def episode_over(payload: Any, _: RpcConnection) -> None:
        await proxy.episode_over(payload["trajectory"])

    async def abort(payload: Any, _: RpcConnection) -> None:
        await announce_abort(payload)
        await proxy.abort(payload["trajectories"], StopReason(payload["reason"]))

    async def set_oldest_admissible(payload: Any, _: RpcConnection) -> None:
        proxy.set_oldest_admissible(payload["version"])

    async def rebind(payload: Any, _: RpcConnection) -> None:
        proxy.rebind(payload["affinity"])

    async def suspend(_: Any, __: RpcConnection) -> None:
        await proxy.updates.suspend()

    async def prefetch(payload: Any, _: RpcConnection) -> None:
        await proxy.updates.prefetch(payload["version"])

    async def load_weights(payload: Any, _: RpcConnection) -> None:
        await proxy.updates.load_weights(payload["version"])

    async def resume(_: Any, __: RpcConnection) -> None:
        await proxy.updates.resume()

    async def recompute(_: Any, __: RpcConnection) -> int:
        return await proxy.updates.recompute()

    async def join(payload: Any, _: RpcConnection) -> None:
        try:
            await proxy.updates.join(EngineAddress(**payload))
        except TimeoutError as error:
            raise RpcError("lost", f"{payload['name']} did not join in rollout.update_limit_s") from error

    async def restart_failed(payload: Any, _: RpcConnection) -> None:
        proxy.workers.lost(payload["name"], payload["why"])

    async def lost_workers(_: Any, __: RpcConnection) -> dict[str, Any]:
        """Waits until there are `Losses` to tell."""
        return asdict(await proxy.workers.losses())

    async def ping(_: Any, __: RpcConnection) -> None:
        return None

    async def stats(_: Any, __: RpcConnection) -> dict[str, Any]:
        return await proxy.stats()

    handlers = (
        generate,
        finish,
        expect,
        episode_over,
        abort,
        set_oldest_admissible,
        rebind,
        suspend,
        prefetch,
        load_weights,
        resume,
        recompute,
        join,
        restart_failed,
        lost_workers,
        ping,
        stats,
    )
    return {handler.__name__: handler for handler in handlers}


if __name__ == "__main__":
    from infra.processes import serve

    logging.basicConfig(level=logging.INFO)
    serve(serve_proxy)
