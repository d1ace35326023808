"""The proxy has its workers pull a version before they are to serve it."""

import pytest

from tasks.rollout.proxy import LLMProxy
from tasks.rollout.routing import Router
from tasks.rollout.workers import EngineAddress
from tests.rollout.scripted_engine import ScriptedEngine


async def test_every_worker_pulls_beside_its_turns_and_one_that_cannot_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    able, unable = ScriptedEngine(extra=["prefetch"]), ScriptedEngine()
    proxy = LLMProxy(Router(), 5.0)
    for name, engine in (("able", able), ("unable", unable)):
        await proxy.add_engine(EngineAddress(name, await engine.server.start()))
    await proxy.updates.prefetch(3)
    assert able.last("prefetch") == {"version": 3}
    assert able.count("suspend") == 0
    assert "unable did not pull version 3 ahead: unknown_method" in caplog.text
    await proxy.updates.suspend()
    await proxy.updates.load_weights(3)
    assert able.version == unable.version == proxy.updates.version == 3
    await proxy.close()
    for engine in (able, unable):
        await engine.server.stop()
