"""A service that answers with what it is told, and says where it listens."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

from infra.rpc import RpcConnection, RpcServer


async def serve_echo(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    async def echo(payload: Any, _: RpcConnection) -> Any:
        return payload

    server = RpcServer({"echo": echo}, token=settings.get("token"))
    url = await server.start(settings["host"])
    ready({"url": url, "pid": os.getpid(), "variable": os.environ.get("ECHO_VARIABLE")})
    await asyncio.Event().wait()


if __name__ == "__main__":
    from infra.processes import serve

    serve(serve_echo)
