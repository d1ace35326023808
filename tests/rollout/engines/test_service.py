import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from blocks.weight_store import WeightStore
from infra.object_store import ObjectStore
from infra.processes import ServiceFailed, ServiceProcess
from infra.rpc import RpcClient, RpcError
from tasks.rollout.engines.base import EngineStats
from tasks.rollout.engines.client import RemoteEngine
from tasks.trajectory import StopReason
from tasks.weights.publication import publish
from tests.rollout.engines.tiny_models import MAX_CONTEXT, make_engine, make_model, prompt, request

pytestmark = pytest.mark.slow
TOKEN = "a secret of the test"


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """A real model saved by transformers, and a weight store with its versions 1 and 2 (of another model)."""
    make_model(0).save_pretrained(tmp_path / "model")
    store = WeightStore(ObjectStore(str(tmp_path / "weights")))
    publish(store, 1, make_model(1).state_dict().items())
    publish(store, 2, [("model.norm.weight", make_model(1).model.norm.weight)])
    return {
        "model": str(tmp_path / "model"),
        "engine": {"kind": "torch", "threads": 1, "max_running": 4, "max_sessions": 16},
        "weights": {"url": str(tmp_path / "weights")},
        "version": None,
        "max_context": MAX_CONTEXT,
        "token": TOKEN,
    }


@pytest.fixture
async def service(settings: dict[str, Any], tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    process = await start(settings, tmp_path)
    yield process
    await process.stop()


async def start(settings: dict[str, Any], folder: Path) -> ServiceProcess:
    return await ServiceProcess.start(
        "engine", "tasks.rollout.engines.service", settings, folder / "engine.log"
    )


async def connect(service: ServiceProcess) -> tuple[RpcClient, RemoteEngine]:
    client = await RpcClient(service.url, token=TOKEN).connect()
    return client, RemoteEngine(client)


async def until(engine: RemoteEngine, holds: Callable[[EngineStats], bool]) -> EngineStats:
    async with asyncio.timeout(20):
        while True:
            stats = await engine.stats()
            if holds(stats):
                return stats
            await asyncio.sleep(0.005)


async def test_it_serves_the_protocol_and_takes_published_weights(service: ServiceProcess) -> None:
    client, engine = await connect(service)
    requests = [request(f"s{i}", prompt(i, 4 + i), 6, temperature=0.0, seed=i) for i in range(6)]
    found = await asyncio.gather(*(engine.generate(each) for each in requests))
    async with make_engine(0, stop_tokens=[2]) as old, make_engine(1, stop_tokens=[2]) as new:
        for each, answer in zip(requests, found, strict=True):
            expected = await old.generate(each)
            assert answer.tokens.tolist() == expected.tokens.tolist()
            assert answer.stop is expected.stop
            assert answer.versions.tolist() == [0] * len(answer.tokens)
            np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-4)
        with pytest.raises(RpcError, match="not_suspended"):
            await engine.load_weights(1)
        await engine.suspend()
        held = asyncio.create_task(engine.generate(requests[0]))
        with pytest.raises(RpcError) as raised:
            await engine.load_weights(2)
        assert raised.value.code == "weights_rejected"
        assert "missing: model.embed_tokens.weight" in raised.value.message
        with pytest.raises(RpcError, match="version 7 is not published"):
            await engine.load_weights(7)
        assert (await engine.stats()).version == 0
        await engine.load_weights(1)
        assert not held.done()
        await engine.resume()
        updated = await held
        assert updated.tokens.tolist() == (await new.generate(requests[0])).tokens.tolist()
        assert set(updated.versions.tolist()) == {1}
    stats = await engine.stats()
    assert (stats.version, stats.running, stats.sessions) == (1, 0, 1)
    await engine.end_session("s0")
    assert (await engine.stats()).sessions == 0
    with pytest.raises(RpcError) as raised:
        await engine.generate(request(tokens=prompt(0, MAX_CONTEXT)))
    assert raised.value.code == "context_overflow"
    await client.close()


async def test_it_begins_with_a_published_version_when_told(settings: dict[str, Any], tmp_path: Path) -> None:
    process = await start({**settings, "version": 1}, tmp_path)
    try:
        assert process.ready["version"] == 1
        client, engine = await connect(process)
        found = await engine.generate(request(temperature=0.0))
        async with make_engine(1, stop_tokens=[2]) as expected:
            assert (
                found.tokens.tolist() == (await expected.generate(request(temperature=0.0))).tokens.tolist()
            )
        assert set(found.versions.tolist()) == {1}
        await client.close()
    finally:
        await process.stop()


async def test_a_lost_client_aborts_its_requests_and_no_others(service: ServiceProcess) -> None:
    lost_client, lost = await connect(service)
    client, engine = await connect(service)
    await engine.suspend()
    tasks = [asyncio.create_task(lost.generate(request(f"lost{i}", count=80, seed=i))) for i in range(12)]
    kept = asyncio.create_task(engine.generate(request("kept", count=80)))
    await until(engine, lambda stats: stats.running + stats.waiting == 13)
    while (frozen := await engine.stats()).running == 0:
        await engine.resume()
        await engine.suspend()
    assert frozen.waiting > 1
    await lost_client.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(engine, lambda stats: stats.running + stats.waiting == 1)
    await engine.resume()
    assert len((await kept).tokens) > 0
    assert (await kept).stop in (StopReason.LENGTH, StopReason.STOP)
    for i in range(12):
        await engine.end_session(f"lost{i}")
    await client.call("end_sessions", {"sessions": ["kept", "unknown"]})
    assert (await engine.stats()).sessions == 0
    await client.close()


async def test_cancelling_a_call_and_abort_end_requests(service: ServiceProcess) -> None:
    client, engine = await connect(service)
    await engine.suspend()
    cancelled = asyncio.create_task(engine.generate(request("cancelled", count=80)))
    aborted = asyncio.create_task(engine.generate(request("aborted", count=80)))
    await until(engine, lambda stats: stats.running + stats.waiting == 2)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await until(engine, lambda stats: stats.running + stats.waiting == 1)
    await engine.abort(["aborted"], StopReason.STALE)
    assert (await aborted).stop is StopReason.STALE
    await client.close()


async def test_metrics_are_in_prometheus_form(service: ServiceProcess) -> None:
    client, engine = await connect(service)
    await engine.generate(request(count=5, tokens=(4, 5, 6)))
    stats = await engine.stats()
    async with aiohttp.ClientSession() as session, session.get(f"{service.url}/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        lines = (await response.text()).splitlines()
    assert "tutti_engine_prefill_tokens_total 3.0" in lines
    assert f"tutti_engine_decode_tokens_total {float(stats.decode_tokens)}" in lines
    assert "tutti_engine_policy_version 0.0" in lines
    assert "# TYPE tutti_engine_running_requests gauge" in lines
    await client.close()


async def test_a_context_beyond_the_model_is_refused_before_it_serves(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ServiceFailed, match=r"max_context \(97\) is above"):
        await start({**settings, "max_context": MAX_CONTEXT + 1}, tmp_path)
