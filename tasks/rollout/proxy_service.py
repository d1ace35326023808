"""The proxy's process: `LLMProxy` over RPC."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from infra.rpc import RpcConnection, RpcServer
from tasks.rollout.proxy import EngineAddress, LLMProxy
from tasks.rollout.routing import Router
from tasks.trajectory import StopReason


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
