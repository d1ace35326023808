import asyncio
import copy
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from infra.rpc import RpcError
from tasks.rollout.engines.base import Generation
from tasks.rollout.engines.decoder import WeightsMismatch
from tasks.rollout.engines.torch import TorchEngine
from tasks.trajectory import StopReason
from tests.rollout.engines.tiny_models import (
    load_version,
    make_engine,
    make_model,
    prompt,
    request,
)


def reference_logprobs(version: int, context: list[int], tokens: list[int], temperature: float) -> np.ndarray:
    """Of `tokens` after `context`, by the Hugging Face model, in float64."""
    model = copy.deepcopy(make_model(version)).double()
    with torch.no_grad():
        logits = model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1] / (
            temperature or 1.0
        )
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1).numpy()


async def when(engine: TorchEngine, **at_least: int) -> None:
    """Wait until the engine's statistics have reached these values."""
    while True:
        stats = await engine.stats()
        if all(getattr(stats, name) >= value for name, value in at_least.items()):
            return
        await asyncio.sleep(0)


def same(a: Generation, b: Generation) -> None:
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.logprobs.tobytes() == b.logprobs.tobytes()
    assert a.stop is b.stop


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
async def test_logprobs_are_of_the_distribution_sampled_from(temperature: float) -> None:
    async with make_engine() as engine:
        context = prompt(1, 12)
        found = await engine.generate(request(tokens=context, count=20, temperature=temperature))
    assert len(found.tokens) == 20
    assert found.stop is StopReason.LENGTH
    assert found.versions.tolist() == [0] * 20
    assert found.logprobs.dtype == np.float32
    expected = reference_logprobs(0, context, found.tokens.tolist(), temperature)
    np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)


async def test_what_is_sampled_does_not_depend_on_the_batch() -> None:
    requests = [
        request(f"s{index}", prompt(index, 3 + index % 40), 4 + index % 9, seed=index) for index in range(20)
    ]
    async with make_engine(max_running=16, max_batch_tokens=64) as engine:
        together = await asyncio.gather(*(engine.generate(each) for each in requests))
    async with make_engine() as engine:
        for each, crowded in zip(requests, together, strict=True):
            alone = await engine.generate(each)
            assert crowded.tokens.tolist() == alone.tokens.tolist()
            np.testing.assert_allclose(crowded.logprobs, alone.logprobs, atol=1e-4)


async def test_one_request_at_a_time_is_deterministic_to_the_bit() -> None:
    runs = []
    for _ in range(2):
        async with make_engine() as engine:
            runs.append([await engine.generate(request(f"s{i}", prompt(i, 9), seed=i)) for i in range(6)])
    for first, second in zip(*runs, strict=True):
        same(first, second)


async def test_members_of_a_group_differ_by_their_seed() -> None:
    async with make_engine() as engine:
        group = await asyncio.gather(*(engine.generate(request(f"m{i}", seed=i)) for i in range(8)))
    assert len({tuple(member.tokens.tolist()) for member in group}) == 8


async def test_turns_reuse_the_cache_and_are_as_if_computed_afresh() -> None:
    async with make_engine() as engine, make_engine() as fresh:
        context = prompt(3, 10)
        for turn in range(4):
            answer = await engine.generate(request(tokens=context, count=3, seed=turn))
            again = await fresh.generate(request(f"t{turn}", context, 3, seed=turn))
            assert answer.tokens.tolist() == again.tokens.tolist()
            np.testing.assert_allclose(answer.logprobs, again.logprobs, atol=1e-4)
            context += [*answer.tokens.tolist(), *prompt(turn, 5)]
        stats = await engine.stats()
    assert stats.cached_tokens == 12 + 20 + 28
    assert stats.prefill_tokens == 10 + 3 * 6
    assert stats.decode_tokens == 12
    assert (stats.sessions, stats.running, stats.waiting) == (1, 0, 0)


async def test_the_stop_token_ends_a_turn_and_is_kept() -> None:
    async with make_engine() as engine:
        free = (await engine.generate(request(count=12, seed=4))).tokens.tolist()
    stop = free[5]
    async with make_engine(stop_tokens=[stop]) as engine:
        found = await engine.generate(request(count=12, seed=4))
    assert found.tokens.tolist() == free[: free.index(stop) + 1]
    assert found.stop is StopReason.STOP


async def test_an_update_in_mid_request_changes_stamps_and_recomputes_the_cache() -> None:
    context = prompt(5, 15)
    async with make_engine() as engine:
        running = asyncio.create_task(engine.generate(request("a", context, 30, temperature=0.0)))
        other = asyncio.create_task(engine.generate(request("b", prompt(6, 7), 30, temperature=0.0)))
        await when(engine, decode_tokens=20)
        await engine.suspend()
        frozen = await engine.stats()
        await asyncio.sleep(0.02)
        assert (await engine.stats()).steps == frozen.steps
        assert frozen.suspended
        assert not running.done()
        await engine.load_weights(1)
        assert (await engine.stats()).decode_tokens == frozen.decode_tokens
        await engine.resume()
        found, _ = await running, await other
        stats = await engine.stats()
    changed = found.versions.tolist().index(1)
    assert 0 < changed < 30
    assert found.versions.tolist() == [0] * changed + [1] * (30 - changed)
    before, after = found.tokens[:changed].tolist(), found.tokens[changed:].tolist()
    async with make_engine(version=1) as engine:
        fresh = await engine.generate(request("c", context + before, 30 - changed, temperature=0.0))
    assert after == fresh.tokens.tolist()
    assert fresh.versions.tolist() == [1] * (30 - changed)
    np.testing.assert_allclose(found.logprobs[changed:], fresh.logprobs, atol=1e-4)
    np.testing.assert_allclose(
        found.logprobs[:changed], reference_logprobs(0, context, before, 0.0), atol=1e-4
    )
    assert stats.version == 1
    assert stats.recomputed_tokens == (15 + 7) + (frozen.decode_tokens - 2)


async def test_an_idle_session_forgets_its_cache_at_an_update() -> None:
    async with make_engine() as engine:
        await engine.generate(request(count=2))
        await engine.suspend()
        await engine.load_weights(1)
        await engine.resume()
        assert (await engine.stats()).sessions == 0
        found = await engine.generate(request(tokens=(5, 9, 11, 12), count=6))
        assert (await engine.stats()).cached_tokens == 0
    np.testing.assert_allclose(
        found.logprobs, reference_logprobs(1, [5, 9, 11, 12], found.tokens.tolist(), 1.0), atol=1e-4
    )


async def test_suspension_without_an_update_keeps_the_cache() -> None:
    async with make_engine() as engine:
        undisturbed = await engine.generate(request("a", count=20))
        running = asyncio.create_task(engine.generate(request("b", count=20)))
        await when(engine, decode_tokens=25)
        await engine.suspend()
        await engine.resume()
        same(await running, undisturbed)
        assert (await engine.stats()).recomputed_tokens == 0


async def test_a_version_that_cannot_be_loaded_leaves_the_old_one_serving() -> None:
    def load(version: int) -> Iterable[tuple[str, torch.Tensor]]:
        for name, tensor in load_version(version):
            if version == 1 and name.startswith("model.layers.1"):
                raise ConnectionError("the store is gone")
            if version != 2 or name != "model.layers.1.mlp.down_proj.weight":
                yield name, tensor

    async with make_engine(load=load) as engine:
        before = await engine.generate(request("a", temperature=0.0))
        await engine.suspend()
        with pytest.raises(ConnectionError):
            await engine.load_weights(1)
        with pytest.raises(WeightsMismatch, match=r"missing: model\.layers\.1\.mlp\.down_proj\.weight"):
            await engine.load_weights(2)
        await engine.resume()
        same(await engine.generate(request("b", temperature=0.0)), before)
        assert (await engine.stats()).version == 0


async def test_more_sessions_than_slots_evict_the_oldest() -> None:
    async with make_engine(max_running=2, max_sessions=3) as engine:
        contexts = {f"s{i}": prompt(i, 6) for i in range(6)}
        for turn in range(3):
            for session, context in contexts.items():
                found = await engine.generate(request(session, context, 4, seed=turn))
                expected = reference_logprobs(0, context, found.tokens.tolist(), 1.0)
                np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)
                context += found.tokens.tolist()
        stats = await engine.stats()
    assert stats.sessions == 3
    assert stats.cached_tokens == 0  # in this order each is evicted before its next turn


async def test_broken_weights_end_the_engine_with_an_error_to_every_caller() -> None:
    def load(version: int) -> Iterable[tuple[str, torch.Tensor]]:
        return (
            (name, tensor * float("nan"))
            for name, tensor in load_version(version)
            if name != "lm_head.weight"
        )

    async with make_engine(load=load) as engine:
        tasks = [asyncio.create_task(engine.generate(request(f"s{i}", count=60))) for i in range(2)]
        await when(engine, decode_tokens=4)
        await engine.suspend()
        await engine.load_weights(1)
        await engine.resume()
        for task in tasks:
            with pytest.raises(RpcError, match="NonFiniteLogits"):
                await task
        with pytest.raises(RpcError, match="engine_failed"):
            await engine.generate(request("later"))
        with pytest.raises(RuntimeError, match="non-finite"):
            await engine.wait_failed()
