"""A prefill and a decode engine that share KV over RPC on loopback, both in this process."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np

from infra.rpc import RpcServer
from tasks.rollout.engines.base import GenerateRequest, Generation, HeldKv, KvSource
from tasks.rollout.engines.service import engine_handlers
from tasks.rollout.engines.torch import TorchEngine
from tests.rollout.engines.tiny_models import make_engine

TOKEN = "a secret of the test"


@dataclass(frozen=True, slots=True)
class Pair:
    prefiller: TorchEngine
    decoder: TorchEngine
    url: str  # of the prefill engine
    server: RpcServer

    def source(self, key: str) -> KvSource:
        return KvSource(self.url, TOKEN, key)

    async def prefill(self, session: str, tokens: Iterable[int]) -> HeldKv:
        return await self.prefiller.prefill(session, np.array(list(tokens), np.int32))

    async def generate(self, request: GenerateRequest) -> Generation:
        """The turn, prefilled by the one and decoded by the other."""
        held = await self.prefiller.prefill(request.session, request.tokens)
        return await self.decoder.generate(replace(request, kv=self.source(held.key)))


async def when(engine: TorchEngine, **at_least: int) -> None:
    """Wait until the engine's statistics have reached these values."""
    async with asyncio.timeout(60):
        while True:
            stats = await engine.stats()
            if all(getattr(stats, name) >= value for name, value in at_least.items()):
                return
            await asyncio.sleep(0)


@asynccontextmanager
async def serve(engine: TorchEngine) -> AsyncIterator[tuple[RpcServer, str]]:
    server = RpcServer(engine_handlers(engine), token=TOKEN)
    url = await server.start()
    try:
        yield server, url
    finally:
        await server.stop()


@asynccontextmanager
async def pair(
    version: int = 0, prefill_settings: dict[str, int] | None = None, **settings: int
) -> AsyncIterator[Pair]:
    async with (
        make_engine(version, **(prefill_settings or settings)) as prefiller,
        make_engine(version, **settings) as decoder,
        serve(prefiller) as (server, url),
    ):
        yield Pair(prefiller, decoder, url, server)
