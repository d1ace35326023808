"""An engine that computes nothing: the proxy's benchmark asks it what the proxy itself costs.

`python -m tests.bench.instant_engine` serves the engine protocol's wire form. `generate` answers with 8
tokens at once, or `hold_s` seconds after it was asked, as `hold` last said.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from infra.rpc import RpcConnection, RpcServer

TOKENS = 8


async def serve_engine(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Settings: token."""
    answer = {
        "tokens": np.arange(TOKENS, dtype="<i4").tobytes(),
        "logprobs": np.full(TOKENS, -1.0, "<f4").tobytes(),
        "versions": np.zeros(TOKENS, "<i4").tobytes(),
        "stop": "length",
    }
    hold_s = 0.0
    held = most_held = 0

    async def generate(_: Any, __: RpcConnection) -> dict[str, Any]:
        nonlocal held, most_held
        if hold_s:
            held += 1
            most_held = max(most_held, held)
            await asyncio.sleep(hold_s)
            held -= 1
        return answer

    async def hold(payload: Any, _: RpcConnection) -> int:
        """Returns the most requests that were held at a time since the last call."""
        nonlocal hold_s, most_held
        hold_s = payload["hold_s"]
        most, most_held = most_held, 0
        return most

    async def stats(_: Any, __: RpcConnection) -> dict[str, Any]:
        return {"version": 0}

    async def nothing(_: Any, __: RpcConnection) -> None:
        """End of sessions, aborts, suspensions: there is nothing to do for them."""

    commands = ("abort", "end_session", "end_sessions", "suspend", "load_weights", "resume", "ping")
    server = RpcServer(
        {"generate": generate, "hold": hold, "stats": stats, **dict.fromkeys(commands, nothing)},
        token=settings["token"],
    )
    ready({"url": await server.start()})
    await asyncio.Event().wait()


if __name__ == "__main__":
    from infra.processes import serve

    serve(serve_engine)
