"""Real engines and a real proxy, each a process of its own, killed or frozen in the middle of things."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blocks.weight_store import WeightStore
from infra.launcher import LocalLauncher, LocalService
from infra.object_store import ObjectStore
from infra.rpc import RpcClient, RpcError
from tasks.rollout.config import RolloutConfig, TorchEngineConfig
from tasks.rollout.engines.base import GenerateRequest
from tasks.rollout.engines.torch import TorchEngine
from tasks.rollout.fleet import RolloutFleet
from tasks.trajectory import StopReason
from tasks.weights.publication import publish

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CONTEXT = 600
PROMPT = [5, 9, 11, 3]
LONG = CONTEXT - len(PROMPT)  # tokens of a turn that lasts a second or more
HEARTBEAT_S = 4.0
# The end token is outside the vocabulary: every turn has its full length.
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=192,
    intermediate_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
    initializer_range=0.08,
    bos_token_id=1,
    eos_token_id=64,
)


def policy(version: int) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(version)
        return LlamaForCausalLM(CONFIG).eval()


def local_engine() -> TorchEngine:
    return TorchEngine(
        CONFIG,
        policy(0).state_dict().items(),
        settings=TorchEngineConfig(),
        max_context=CONTEXT,
        stop_tokens=(),
        load=lambda version: policy(version).state_dict().items(),
    )


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and versions 1 to 3 of it in a weight store."""
    folder = tmp_path_factory.mktemp("faults")
    policy(0).save_pretrained(folder / "model")
    store = WeightStore(ObjectStore(str(folder / "weights")))
    for version in (1, 2, 3):
        publish(store, version, policy(version).state_dict().items())
    return folder


@asynccontextmanager
async def fleet_of(
    stores: Path, logs: Path, *, engines: int = 2, **options: Any
) -> AsyncIterator[RolloutFleet]:
    config = RolloutConfig(
        engine=TorchEngineConfig(workers=engines, max_running=4, max_sessions=16),
        progress_every_s=0.02,
        heartbeat_limit_s=HEARTBEAT_S,
        update_limit_s=120.0,
        **options,
    )
    fleet = await RolloutFleet.start(
        config,
        LocalLauncher(),
        model=stores / "model",
        max_context=CONTEXT,
        weights_url=str(stores / "weights"),
        version=None,
        logs=logs,
    )
    try:
        yield fleet
    finally:
        await fleet.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(stores: Path) -> AsyncIterator[RolloutFleet]:
    async with fleet_of(stores, stores / "logs", worker_restarts=10) as fleet:
        yield fleet


def send(service: Any, what: signal.Signals) -> int:
    assert isinstance(service, LocalService)
    pid = service.process.process.pid
    os.kill(pid, what)
    return pid


def turn(
    trajectory: str = "t", *, seed: int = 7, version: int | None = 0, count: int = LONG
) -> dict[str, Any]:
    return {
        "trajectory": trajectory,
        "domain": "math",
        "tokens": np.array(PROMPT, "<i4").tobytes(),
        "max_new_tokens": count,
        "temperature": 1.0,
        "seed": seed,
        "initiating_version": version,
    }


@asynccontextmanager
async def environment(fleet: RolloutFleet) -> AsyncIterator[RpcClient]:
    client = await RpcClient(fleet.proxy_url, token=fleet.token).connect()
    try:
        yield client
    finally:
        client.drop()
        await client.close()


async def stats_when(fleet: RolloutFleet, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(120):
        while True:
            stats: dict[str, Any] = await fleet.tell_proxy("stats")
            if holds(stats):
                return stats
            await asyncio.sleep(0.02)


def all_serve(stats: dict[str, Any]) -> bool:
    return set(stats["workers"].values()) <= {"serving", "suspected"}


def runs_on(stats: dict[str, Any]) -> int:
    (name,) = [name for name, engine in stats["engines"].items() if engine["running"]]
    return int(name.removeprefix("engine-"))


async def uninterrupted(tokens: list[int], count: int, seed: int, sampled_before: int = 0) -> list[int]:
    torch.set_num_threads(1)
    async with local_engine() as engine:
        generation = await engine.generate(
            GenerateRequest("s", np.array(tokens, np.int32), count, 1.0, seed, sampled_before)
        )
    return generation.tokens.tolist()


async def assert_as_uninterrupted(answer: dict[str, Any], seed: int, kept: int) -> None:
    """`kept` tokens are those of a run that nothing interrupted, and the others those that such a run samples
    after them: the draws go on where they were."""
    tokens = np.frombuffer(answer["tokens"], "<i4").tolist()
    assert len(tokens) == LONG
    assert len(answer["tokens"]) == len(answer["logprobs"]) == len(answer["versions"])
    assert tokens[:kept] == (await uninterrupted(PROMPT, LONG, seed))[:kept]
    assert tokens[kept:] == await uninterrupted([*PROMPT, *tokens[:kept]], LONG - kept, seed, kept)


async def code_of(call: Any) -> str:
    with pytest.raises(RpcError) as raised:
        await call
    return raised.value.code


async def test_a_turn_on_a_killed_worker_goes_on_elsewhere_and_the_worker_comes_back_through_an_update(
    fleet: RolloutFleet,
) -> None:
    async with environment(fleet) as proxy:
        running = asyncio.create_task(proxy.call("generate", turn()))
        index = runs_on(await stats_when(fleet, lambda stats: stats["reported_tokens"] > 20))
        send(fleet.engines[index], signal.SIGKILL)
        answer = await running
        stats = await fleet.tell_proxy("stats")
        assert stats["continued_turns"] == 1
        assert 20 < stats["kept_tokens"] < LONG
        await assert_as_uninterrupted(answer, 7, stats["kept_tokens"])
        assert set(np.frombuffer(answer["versions"], "<i4").tolist()) == {0}
        stats = await stats_when(fleet, all_serve)
        assert len(stats["engines"]) == 2

        # One is killed while it is suspended, with a turn frozen on it and another one held at the gate.
        running = asyncio.create_task(proxy.call("generate", turn("u", seed=8)))
        index = runs_on(await stats_when(fleet, lambda stats: stats["reported_tokens"] > 20))
        await fleet.suspend()
        held = asyncio.create_task(proxy.call("generate", turn("v", count=4)))
        send(fleet.engines[index], signal.SIGKILL)
        await fleet.load_weights(1)
        assert not held.done()
        await fleet.resume()
        versions = np.frombuffer((await running)["versions"], "<i4")
        assert set(versions.tolist()) == {0, 1}
        assert (np.diff(versions) >= 0).all()
        assert set(np.frombuffer((await held)["versions"], "<i4").tolist()) == {1}
        stats = await stats_when(fleet, lambda stats: all_serve(stats) and len(stats["engines"]) == 2)
        assert {engine["version"] for engine in stats["engines"].values()} == {1}
        assert not any(engine["suspended"] for engine in stats["engines"].values())
        # What the lost lives had done still counts.
        assert (await fleet.counters())["turns"] == 3


async def test_a_frozen_worker_is_killed_and_holds_neither_turns_nor_updates_up(fleet: RolloutFleet) -> None:
    async with environment(fleet) as proxy:
        version = (await stats_when(fleet, all_serve))["version"] + 1
        running = asyncio.create_task(proxy.call("generate", turn()))
        index = runs_on(await stats_when(fleet, lambda stats: stats["reported_tokens"] > 20))
        frozen = fleet.engines[index]
        pid = send(frozen, signal.SIGSTOP)
        await fleet.suspend()
        await fleet.load_weights(version)
        await fleet.resume()
        versions = np.frombuffer((await running)["versions"], "<i4").tolist()
        assert len(versions) == LONG
        assert versions[-1] == version
        stats = await stats_when(fleet, lambda stats: all_serve(stats) and len(stats["engines"]) == 2)
        assert {engine["version"] for engine in stats["engines"].values()} == {version}
        assert fleet.engines[index] is not frozen
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_killed_or_frozen_proxy_is_started_again_with_what_it_knew(
    stores: Path, tmp_path: Path
) -> None:
    async with fleet_of(stores, tmp_path, engines=1) as fleet:
        url = fleet.proxy_url
        await fleet.suspend()
        await fleet.load_weights(2)
        await fleet.resume()
        await fleet.set_oldest_admissible(2)
        await fleet.abort(["aborted"], StopReason.CANCELLED)
        async with environment(fleet) as proxy:
            lost = asyncio.create_task(proxy.call("generate", turn(version=2)))
            await stats_when(fleet, lambda stats: stats["reported_tokens"] > 20)
            send(fleet.proxy, signal.SIGKILL)
            assert await code_of(lost) == "connection_lost"
        await fleet.suspend()  # a command meets the next proxy
        await fleet.resume()
        assert fleet.proxy_url == url
        async with environment(fleet) as proxy:
            answer = await proxy.call("generate", turn(version=2))
            assert len(answer["tokens"]) == 4 * LONG
            assert set(np.frombuffer(answer["versions"], "<i4").tolist()) == {2}
            assert await code_of(proxy.call("generate", turn("old", version=1))) == "stale"
            assert await code_of(proxy.call("generate", turn("aborted", version=2))) == "cancelled"
            assert (await fleet.tell_proxy("stats"))["version"] == 2

            pid = send(fleet.proxy, signal.SIGSTOP)
            await fleet.set_oldest_admissible(3)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        async with environment(fleet) as proxy:
            assert await code_of(proxy.call("generate", turn("old", version=2))) == "stale"
            assert len((await proxy.call("generate", turn(version=3, count=4)))["tokens"]) == 16
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
            lines = (await response.text()).splitlines()
        assert 'tutti_proxy_workers{phase="serving"} 1.0' in lines
        assert "tutti_proxy_policy_version 2.0" in lines


async def test_with_no_worker_left_turns_fail_and_the_fleet_says_so(stores: Path, tmp_path: Path) -> None:
    async with fleet_of(stores, tmp_path, engines=1, worker_restarts=0) as fleet, environment(fleet) as proxy:
        running = asyncio.create_task(proxy.call("generate", turn()))
        await stats_when(fleet, lambda stats: stats["reported_tokens"] > 20)
        for engine in fleet.engines:
            send(engine, signal.SIGKILL)
        assert await code_of(running) == "generation_failed"
        async with asyncio.timeout(60):
            assert "no inference worker is left" in await fleet.wait_failed()
