"""The engine's process: the inference engine protocol over RPC, and Prometheus metrics at GET /metrics."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from blocks.weight_store import open_weight_store
from infra.config import Config
from infra.rpc import Handler, RpcConnection, RpcError, RpcServer
from tasks.rollout.config import EngineConfig, TorchEngineConfig, VllmEngineConfig
from tasks.rollout.engines.base import EngineStats, GenerateRequest, HostedEngine, InferenceEngine
from tasks.rollout.engines.decoder import WeightsMismatch
from tasks.rollout.engines.model_directory import ModelDirectory
from tasks.rollout.engines.torch import TorchEngine
from tasks.rollout.engines.vllm.engine import VllmEngine
from tasks.trajectory import StopReason
from tasks.weights.publication import WeightReceiver, WeightsError


class WeightsLocation(Config):
    url: str
    """fsspec URL of the weight store."""
    options: dict[str, Any] = {}
    """Passed to its file system."""


class EngineServiceSettings(Config):
    """What the parent writes to the service's standard input."""

    model: Path
    """Directory in Hugging Face format."""
    engine: EngineConfig = TorchEngineConfig()
    weights: WeightsLocation
    version: NonNegativeInt | None = None
    """Published version to serve; None serves the directory's own weights as version 0."""
    max_context: PositiveInt
    token: str | None = None
    host: str = "127.0.0.1"
    port: NonNegativeInt = 0


async def serve_engine(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Serves until cancelled; raises what ends the engine. See `EngineServiceSettings`."""
    parsed = EngineServiceSettings.model_validate(settings)
    async with await asyncio.to_thread(make_engine, parsed) as engine:
        server = RpcServer(
            engine_handlers(engine), token=parsed.token, extra_routes=[web.get("/metrics", _metrics(engine))]
        )
        url = await server.start(parsed.host, parsed.port)
        ready({"url": url, "version": (await engine.stats()).version})
        try:
            await engine.wait_failed()
        finally:
            await server.stop()


def engine_handlers(engine: InferenceEngine) -> dict[str, Handler]:
    """The wire form: arrays as little-endian bytes, stop reasons as their values."""

    async def generate(payload: Any, _: RpcConnection) -> dict[str, Any]:
        generation = await engine.generate(
            GenerateRequest(
                session=payload["session"],
                tokens=np.frombuffer(payload["tokens"], "<i4"),
                max_new_tokens=payload["max_new_tokens"],
                temperature=payload["temperature"],
                seed=payload["seed"],
            )
        )
        return {
            "tokens": generation.tokens.astype("<i4").tobytes(),
            "logprobs": generation.logprobs.astype("<f4").tobytes(),
            "versions": generation.versions.astype("<i4").tobytes(),
            "stop": generation.stop.value,
        }

    async def abort(payload: Any, _: RpcConnection) -> None:
        await engine.abort(payload["sessions"], StopReason(payload["reason"]))

    async def end_session(payload: Any, _: RpcConnection) -> None:
        await engine.end_session(payload["session"])

    async def end_sessions(payload: Any, _: RpcConnection) -> None:
        for session in payload["sessions"]:
            await engine.end_session(session)

    async def suspend(_: Any, __: RpcConnection) -> None:
        await engine.suspend()

    async def load_weights(payload: Any, _: RpcConnection) -> None:
        try:
            await engine.load_weights(payload["version"])
        except (WeightsError, WeightsMismatch) as error:
            raise RpcError("weights_rejected", f"{type(error).__name__}: {error}") from error

    async def resume(_: Any, __: RpcConnection) -> None:
        await engine.resume()

    async def recompute(_: Any, __: RpcConnection) -> int:
        return await engine.recompute()

    async def stats(_: Any, __: RpcConnection) -> dict[str, Any]:
        return asdict(await engine.stats())

    handlers = (generate, abort, end_session, end_sessions, suspend, load_weights, resume, recompute, stats)
    return {handler.__name__: handler for handler in handlers}


def make_engine(settings: EngineServiceSettings) -> HostedEngine:
    """The engine asked for, not started. Blocks; raises ValueError on settings that cannot work."""
    model = ModelDirectory.open(settings.model)
    text = model.config.get_text_config()
    limit = text.max_position_embeddings
    if settings.max_context > limit:
        raise ValueError(
            f"max_context ({settings.max_context}) is above the model's max_position_embeddings ({limit}): "
            "lower the domains' max_tokens"
        )
    if isinstance(settings.engine, VllmEngineConfig):
        return VllmEngine(
            settings=settings.engine,
            model=settings.model,
            max_context=settings.max_context,
            vocabulary=text.vocab_size,
            stop_tokens=model.stop_tokens,
            weights_url=settings.weights.url,
            weights_options=settings.weights.options,
            version=settings.version,
        )
    torch.set_num_threads(settings.engine.threads)
    receiver = WeightReceiver(open_weight_store(settings.weights.url, settings.weights.options))

    def published(version: int) -> Iterable[tuple[str, Tensor]]:
        return receiver.load_whole(version).items()

    return TorchEngine(
        model.config,
        model.weights() if settings.version is None else published(settings.version),
        settings=settings.engine,
        max_context=settings.max_context,
        stop_tokens=model.stop_tokens,
        load=published,
        version=settings.version or 0,
    )


class _EngineCollector(Collector):
    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        if self.stats is None:
            return
        gauges = {
            "policy_version": "Policy version that samples now",
            "running_requests": "Requests in the batch",
            "waiting_requests": "Requests waiting for a place in the batch",
            "sessions": "Trajectories whose KV cache is kept",
            "suspended": "1 while generation is frozen",
        }
        counters = {
            "prefill_tokens": "Context tokens computed, recomputed ones included",
            "recomputed_tokens": "Tokens computed again because the weights changed",
            "decode_tokens": "Tokens sampled",
            "cached_tokens": "Context tokens that a kept KV cache saved",
            "steps": "Engine iterations",
            "busy_seconds": "Seconds with work",
        }
        values = {
            **asdict(self.stats),
            "policy_version": self.stats.version,
            "running_requests": self.stats.running,
            "waiting_requests": self.stats.waiting,
        }
        for name, description in gauges.items():
            yield GaugeMetricFamily(f"tutti_engine_{name}", description, value=float(values[name]))
        for name, description in counters.items():
            yield CounterMetricFamily(f"tutti_engine_{name}", description, value=float(values[name]))


def _metrics(engine: InferenceEngine) -> Callable[[web.Request], Any]:
    collector = _EngineCollector()
    registry = CollectorRegistry()
    registry.register(collector)

    async def metrics(_: web.Request) -> web.Response:
        collector.stats = await engine.stats()
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return metrics


if __name__ == "__main__":
    from infra.processes import serve

    logging.basicConfig(level=logging.INFO)
    serve(serve_engine)
