import asyncio

import pytest

from infra.clock import now
from infra.models import model_of
from infra.virtual_time import run_virtual
from tasks.simulation.cluster import WeightsSpec
from tasks.simulation.weights import SimulatedWeights

SIZE = model_of("qwen3-8b")


def weights(engines: int = 1, **spec: object) -> SimulatedWeights:
    return SimulatedWeights(SIZE, WeightsSpec.model_validate(spec), engines)


def test_a_push_and_a_pull_take_bytes_over_rate() -> None:
    published = weights(transport="store", push_gb_s=2.0, pull_gb_s=4.0, latency_s=0.5)

    async def publish() -> tuple[float, float]:
        await published.push(1)
        pushed = now()
        await published.pull(1)
        return pushed, now() - pushed

    pushed, pulled = run_virtual(publish())
    assert pushed == pytest.approx(0.5 + SIZE.weight_bytes / 2e9)
    assert pulled == pytest.approx(0.5 + SIZE.weight_bytes / 4e9)


def test_engines_that_pull_at_once_share_the_stores_bandwidth() -> None:
    async def pull(published: SimulatedWeights) -> float:
        await asyncio.gather(*(published.pull(0) for _ in range(100)))
        return now()

    alone = run_virtual(pull(weights(1, transport="store", latency_s=0.0)))
    crowded = run_virtual(pull(weights(100, transport="store", latency_s=0.0)))
    assert crowded == pytest.approx(100 * SIZE.weight_bytes / 12.5e9)
    assert alone < crowded


def test_nothing_is_pulled_that_was_not_pushed() -> None:
    with pytest.raises(LookupError, match="version 3"):
        run_virtual(weights(transport="store").pull(3))


def test_direct_transports_push_nothing_and_end_in_the_devices() -> None:
    direct, stored = weights(transport="nccl"), weights(transport="mooncake", device_gb_s=10.0)
    assert direct.direct
    assert direct.load_seconds(1) == 0.0
    assert not stored.direct
    assert stored.load_seconds(4) == pytest.approx(SIZE.weight_bytes / 4 / 10e9)

    async def push() -> float:
        await direct.push(1)
        return now()

    assert run_virtual(push()) == 0.0
