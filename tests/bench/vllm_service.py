"""The engine service with vLLM, as `tasks.rollout.engines.service` runs it, which tells where its server is.

So the benchmark can ask the very same vLLM server without Tutti.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from infra.rpc import RpcServer
from tasks.rollout.engines.service import EngineServiceSettings, engine_handlers, make_engine
from tasks.rollout.engines.vllm.engine import VllmEngine


async def serve_engine(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    parsed = EngineServiceSettings.model_validate(settings)
    made = await asyncio.to_thread(make_engine, parsed)
    assert isinstance(made, VllmEngine)
    async with made as engine:
        server = RpcServer(engine_handlers(engine), token=parsed.token)
        url, token = engine.address
        ready({"url": await server.start(), "vllm_url": url, "vllm_token": token})
        try:
            await engine.wait_failed()
        finally:
            await server.stop()


if __name__ == "__main__":
    from infra.processes import serve

    serve(serve_engine)
