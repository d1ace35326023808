"""Turns through the real proxy with real engines on the wire, of which one prefills."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.launcher import LocalLauncher
from infra.rpc import RpcClient, RpcError, RpcServer
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engines.torch import TorchEngine
from tasks.rollout.fleet import RolloutFleet
from tasks.rollout.proxy import LLMProxy
from tasks.rollout.routing import Router, WorkerRole
from tasks.rollout.workers import EngineAddress, WorkerLimits
from tasks.trajectory import StopReason
from tests.rollout.engines.kv_pairs import TOKEN, serve, when
from tests.rollout.engines.tiny_models import MAX_CONTEXT, make_engine, make_model, prompt, request

LEAST = 20  # tokens that are worth a hand-over


def payload(trajectory: str, tokens: list[int], seed: int = 0, count: int = 6) -> dict[str, Any]:
    return {
        "trajectory": trajectory,
        "domain": "math",
        "tokens": np.array(tokens, "<i4").tobytes(),
        "max_new_tokens": count,
        "temperature": 1.0,
        "seed": seed,
        "initiating_version": 0,
    }


@dataclass(frozen=True, slots=True)
class Fleet:
    proxy: LLMProxy
    engines: dict[str, TorchEngine]
    servers: dict[str, RpcServer]

    async def turn(self, trajectory: str, tokens: list[int], seed: int = 0, count: int = 6) -> list[int]:
        answer = await self.proxy.generate(payload(trajectory, tokens, seed, count))
        sampled: list[int] = np.frombuffer(answer["tokens"], "<i4").tolist()
        return sampled

    async def counts(self, name: str) -> tuple[int, int, int]:
        """Tokens that an engine prefilled, gave and was given."""
        stats = await self.engines[name].stats()
        return stats.prefill_tokens, stats.kv_exported_tokens, stats.kv_imported_tokens


@asynccontextmanager
async def fleet(*roles: WorkerRole, limits: WorkerLimits | None = None) -> AsyncIterator[Fleet]:
    """Workers named by role and number: `prefill-0`, `decode-1`, ..."""
    make_model(1)  # two engines that load it at once would each make their own, of the same random state
    async with AsyncExitStack() as stack:
        proxy = LLMProxy(Router(), 20.0, limits=limits, min_prefill_tokens=LEAST)
        found = Fleet(proxy, {}, {})
        for index, role in enumerate(roles):
            name = f"{role}-{index}"
            found.engines[name] = await stack.enter_async_context(make_engine())
            found.servers[name], url = await stack.enter_async_context(serve(found.engines[name]))
            await proxy.add_engine(EngineAddress(name, url, TOKEN, "default", role))
        stack.push_async_callback(proxy.close)
        yield found


async def alone(tokens: list[int], seed: int = 0, count: int = 6, version: int = 0) -> list[int]:
    async with make_engine(version) as engine:
        found: list[int] = (await engine.generate(request("s", tokens, count, seed=seed))).tokens.tolist()
        return found


async def test_long_turns_are_prefilled_elsewhere_and_short_tails_where_they_are_decoded() -> None:
    async with fleet("prefill", "decode", "decode") as found:
        context = prompt(1, 30)
        first = await found.turn("t", context, seed=1)
        assert first == await alone(context, seed=1)
        assert await found.counts("prefill-0") == (29, 29, 0)
        assert await found.counts("decode-1") == (1, 0, 29)
        # 36 tokens, the last of which has no KV yet, and 10 new ones: too few to hand over.
        context += [*first, *prompt(2, 10)]
        second = await found.turn("t", context, seed=2)
        assert second == await alone(context, seed=2)
        assert await found.counts("prefill-0") == (29, 29, 0)
        assert await found.counts("decode-1") == (1 + 11, 0, 29)
        # 51 tokens have KV here; 25 new ones.
        context += [*second, *prompt(3, 25)]
        third = await found.turn("t", context, seed=3)
        assert third == await alone(context, seed=3)
        assert await found.counts("prefill-0") == (29 + (76 - 29), 29 + 25, 0)
        assert await found.counts("decode-1") == (1 + 11 + 1, 0, 29 + 25)
        assert await found.counts("decode-2") == (0, 0, 0)
        assert (await found.proxy.stats())["prefilled_turns"] == 2
        await found.proxy.finish(["t"])
        assert [(await engine.stats()).sessions for engine in found.engines.values()] == [0, 0, 0]


async def test_many_trajectories_at_once_sample_what_one_engine_would() -> None:
    contexts = {f"t{i}": prompt(50 + i, 3 + 8 * i) for i in range(10)}
    async with fleet("prefill", "prefill", "decode", "decode") as found:
        answers = await asyncio.gather(
            *(found.turn(name, tokens, seed=i) for i, (name, tokens) in enumerate(contexts.items()))
        )
        assert all([(await found.counts(name))[0] > 0 for name in ("prefill-0", "prefill-1")])
        assert not any([(await found.counts(name))[1] for name in ("decode-2", "decode-3")])
    for i, (tokens, answer) in enumerate(zip(contexts.values(), answers, strict=True)):
        assert answer == await alone(tokens, seed=i)


async def test_a_lost_prefill_worker_leaves_prefill_to_the_decoders() -> None:
    async with fleet("prefill", "decode") as found:
        context = prompt(4, 40)
        await found.servers["prefill-0"].stop()
        assert await found.turn("t", context, seed=5) == await alone(context, seed=5)
        assert await found.counts("decode-1") == (40, 0, 0)
        assert await found.turn("u", context, seed=6) == await alone(context, seed=6)


async def test_a_prefill_worker_that_is_lost_with_the_kv_it_held_costs_time_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet("prefill", "decode") as found:
        export, context = found.engines["prefill-0"].export_kv, prompt(5, 40)

        async def lost(key: str, start: int, count: int) -> dict[str, Any]:
            await found.engines["prefill-0"].end_session(key)
            return await export(key, start, count)

        monkeypatch.setattr(found.engines["prefill-0"], "export_kv", lost)
        assert await found.turn("t", context, seed=5) == await alone(context, seed=5)
        assert await found.counts("prefill-0") == (39, 0, 0)
        assert await found.counts("decode-1") == (40, 0, 0)


async def test_after_an_update_the_whole_context_is_prefilled_again() -> None:
    async with fleet("prefill", "decode") as found:
        context = prompt(6, 30)
        context += [*(await found.turn("t", context, seed=1)), 9]
        await found.proxy.updates.suspend()
        await found.proxy.updates.load_weights(1)
        await found.proxy.updates.resume()
        assert await found.turn("t", context, seed=2) == await alone(context, seed=2, version=1)
        assert await found.counts("prefill-0") == (29 + 36, 29 + 36, 0)
        assert await found.counts("decode-1") == (2, 0, 29 + 36)


async def test_an_abort_reaches_a_turn_that_is_being_prefilled() -> None:
    async with fleet("prefill", "decode") as found:
        await found.engines["prefill-0"].suspend()
        turn = asyncio.create_task(found.turn("t", prompt(7, 40)))
        await when(found.engines["prefill-0"], waiting=1)
        await found.proxy.abort(["t"], StopReason.STALE)
        with pytest.raises(RpcError) as raised:
            await turn
        assert raised.value.code == "stale"
        assert await found.counts("decode-1") == (0, 0, 0)


async def test_without_a_decoder_left_turns_fail() -> None:
    async with fleet("prefill", "decode", limits=WorkerLimits(restarts=0)) as found:
        await found.servers["decode-1"].stop()
        with pytest.raises(RpcError, match="no inference worker"):
            await found.turn("t", prompt(8, 5))


@pytest.mark.slow
async def test_a_fleet_has_the_workers_that_the_campaign_asks_for(tmp_path: Path) -> None:
    """Engines and proxy as processes of their own, started from the campaign's options."""
    make_model(0).save_pretrained(tmp_path / "model")
    config = RolloutConfig.model_validate(
        {"engine": {"kind": "torch", "workers": 2, "prefill_workers": 1, "min_prefill_tokens": LEAST}}
    )
    rollout = await RolloutFleet.start(
        config,
        LocalLauncher(),
        model=tmp_path / "model",
        max_context=MAX_CONTEXT,
        weights_url=str(tmp_path / "weights"),
        version=None,
        logs=tmp_path,
    )
    try:
        client = await RpcClient(rollout.proxy_url, token=rollout.token).connect()
        tokens = prompt(9, 40)
        answer = await client.call("generate", payload("t", tokens, seed=3))
        async with make_engine(stop_tokens=[2]) as engine:
            expected = await engine.generate(request("s", tokens, 6, seed=3))
        assert np.frombuffer(answer["tokens"], "<i4").tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(np.frombuffer(answer["logprobs"], "<f4"), expected.logprobs, atol=1e-5)
        counters = await rollout.counters()
        assert (counters["kv_exported_tokens"], counters["kv_imported_tokens"]) == (39, 39)
        assert counters["prefill_tokens"] == 40
        await client.close()
    finally:
        await rollout.stop()
