"""The engine's process: the inference engine protocol over RPC, and Prometheus metrics at GET /metrics."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from blocks.weight_store import open_weight_store
from infra.config import Config
from infra.rpc import Handler, RpcConnection, RpcError, RpcServer
from tasks.rollout.config import EngineConfig, SimulatedEngineConfig, TorchEngineConfig, VllmEngineConfig
from tasks.rollout.engines.base import (
    EngineStats,
    GenerateRequest,
    HostedEngine,
    InferenceEngine,
    KvEngine,
    KvSource,
    PullingEngine,
)
from tasks.rollout.engines.decoder import WeightsMismatch
from tasks.rollout.engines.model_directory import ModelDirectory
from tasks.rollout.engines.progress import CheckedEngine, ProgressEngine, ProgressReports
from tasks.rollout.engines.simulated import SimulatedEngine
from tasks.rollout.engines.torch import TorchEngine
from tasks.rollout.engines.vllm.engine import VllmEngine
from tasks.rollout.routing import WorkerRole
from tasks.trajectory import StopReason
from tasks.weights.publication import WeightReceiver, WeightsError, read_publication


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
    role: WorkerRole = "both"
    """What the proxy gives it of a turn. The embedded engine can do either in any role."""
    progress_every_s: PositiveFloat = 0.25
    """How often running turns are reported to whoever asked for them."""
    token: str | None = None
    host: str = "127.0.0.1"
    port: NonNegativeInt = 0


async def serve_engine(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Serves until cancelled; raises what ends the engine. See `EngineServiceSettings`."""
    parsed = EngineServiceSettings.model_validate(settings)
    async with await asyncio.to_thread(make_engine, parsed) as engine:
        reports = (
            ProgressReports(engine, parsed.progress_every_s) if isinstance(engine, ProgressEngine) else None
        )
        server = RpcServer(
            engine_handlers(engine, reports),
            token=parsed.token,
            extra_routes=[web.get("/metrics", _metrics(engine))],
        )
        url = await server.start(parsed.host, parsed.port)
        ready({"url": url, "version": (await engine.stats()).version})
        reporting = asyncio.create_task(reports.run()) if reports is not None else None
        try:
            await engine.wait_failed()
        finally:
            if reporting is not None:
                reporting.cancel()
            await server.stop()


def engine_handlers(engine: InferenceEngine, reports: ProgressReports | None = None) -> dict[str, Handler]:
    """The wire form: arrays as little-endian bytes, stop reasons as their values."""

    async def generate(payload: Any, connection: RpcConnection) -> dict[str, Any]:
        request = GenerateRequest(
            session=payload["session"],
            tokens=np.frombuffer(payload["tokens"], "<i4"),
            max_new_tokens=payload["max_new_tokens"],
            temperature=payload["temperature"],
            seed=payload["seed"],
            sampled_before=payload.get("sampled_before", 0),
            kv=KvSource(**payload["kv"]) if payload.get("kv") else None,
        )
        with reports.turn(request.session, connection) if reports is not None else contextlib.nullcontext():
            generation = await engine.generate(request)
        return {
            "tokens": generation.tokens.astype("<i4", copy=False).tobytes(),
            "logprobs": generation.logprobs.astype("<f4", copy=False).tobytes(),
            "versions": generation.versions.astype("<i4", copy=False).tobytes(),
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

    async def prefetch(payload: Any, _: RpcConnection) -> None:
        if not isinstance(engine, PullingEngine):
            return
        try:
            await engine.prefetch(payload["version"])
        except (WeightsError, WeightsMismatch) as error:
            raise RpcError("weights_rejected", f"{type(error).__name__}: {error}") from error

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

    async def ping(_: Any, __: RpcConnection) -> None:
        if isinstance(engine, CheckedEngine):
            await engine.check()

    handlers = (
        generate,
        abort,
        end_session,
        end_sessions,
        suspend,
        prefetch,
        load_weights,
        resume,
        recompute,
        stats,
        ping,
    )
    return {handler.__name__: handler for handler in handlers} | _kv_handlers(engine)


def _kv_handlers(engine: InferenceEngine) -> dict[str, Handler]:
    """None where the engine shares no KV."""
    if not isinstance(engine, KvEngine):
        return {}

    async def prefill(payload: Any, _: RpcConnection) -> dict[str, Any]:
        return asdict(await engine.prefill(payload["session"], np.frombuffer(payload["tokens"], "<i4")))

    async def export_kv(payload: Any, _: RpcConnection) -> dict[str, Any]:
        return await engine.export_kv(payload["key"], payload["start"], payload["count"])

    return {"prefill": prefill, "export_kv": export_kv}


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
            role=settings.role,
        )
    if isinstance(settings.engine, SimulatedEngineConfig):
        return _simulated(settings, settings.engine, text.vocab_size, model.stop_tokens)
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


def _simulated(
    settings: EngineServiceSettings,
    engine: SimulatedEngineConfig,
    vocabulary: int,
    stop_tokens: Collection[int],
) -> SimulatedEngine:
    store = open_weight_store(settings.weights.url, settings.weights.options)
    if settings.version is not None:
        read_publication(store, settings.version)
    return SimulatedEngine(
        settings=engine,
        vocabulary=vocabulary,
        stop_tokens=stop_tokens,
        max_context=settings.max_context,
        require_published=functools.partial(read_publication, store),
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
            "kv_exported_tokens": "Tokens whose KV other engines fetched",
            "kv_imported_tokens": "Context tokens that KV fetched from other engines saved",
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
