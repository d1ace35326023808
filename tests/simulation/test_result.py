from typing import Any

import pytest

from tasks.report.measures import batch_tokens
from tasks.simulation.result import result_of
from tasks.simulation.usage import Usage
from tests.simulation.small import small_cluster


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "seconds/step": 10.0,
        "seconds/get_batch": 6.0,
        "staleness/histogram": [4 - step, step],
        "tokens/trained": 90,
        "tokens/wasted/cancelled": 10,
        "episode/math/tokens": 50.0,
        "reward/math/count": 4,
        "episode/game/tokens": 7.0,
        "reward/game/count": 2,
        "reward/math/mean": 0.5,
        **more,
    }


def test_tokens_of_a_batch_are_of_all_its_domains() -> None:
    assert batch_tokens(row(0)) == 4 * 50 + 2 * 7


def test_means_leave_out_the_warm_up() -> None:
    """By hand: the first step takes 100 s, the two after it 20 s and 40 s; half of 4 devices work."""
    rows = [row(0), row(1), row(2, **{"seconds/update": 3.0})]
    usages = [
        Usage(0.0, {"gpus": 0.0}, 0.0),
        Usage(100.0, {"gpus": 80.0}, 0.0),
        Usage(120.0, {"gpus": 120.0}, 0.0),
        Usage(160.0, {"gpus": 200.0}, 0.0),
    ]
    cluster = small_cluster()
    result = result_of(
        cluster, rows, usages, warm_up_steps=1, virtual_seconds=170.0, wall_seconds=0.5, events=9
    )
    assert result.step_seconds == 30.0
    assert result.tokens_per_s == pytest.approx(2 * 214 / 60)
    assert result.stage_seconds == {"get_batch": 6.0, "update": 1.5}
    assert result.utilisation == {"gpus": pytest.approx(120 / (60 * 4))}
    assert result.staleness == [3 + 2, 1 + 2]
    assert result.staleness_mean == pytest.approx(3 / 8)
    assert result.wasted_share == pytest.approx(0.1)
    assert result.usd_per_step == pytest.approx(cluster.usd_per_hour * 30 / 3600)
    assert result.steps == rows[1:]
    assert (result.virtual_seconds, result.wall_seconds, result.events) == (170.0, 0.5, 9)


def test_functions_are_paid_by_the_second() -> None:
    pools = {
        "gpus": {"hardware": "h100", "devices": 4},
        "cpus": {"hardware": "cpu", "devices": 1},
        "calls": {"hardware": "functions", "devices": 1, "usd_per_hour": 7.2},
    }
    cluster = small_cluster(pools=pools, reward={"kind": "functions", "pool": "calls"})
    usages = [Usage(0.0, {}, 0.0), Usage(10.0, {}, 100.0), Usage(20.0, {}, 150.0)]
    result = result_of(
        cluster, [row(0), row(1)], usages, warm_up_steps=1, virtual_seconds=20, wall_seconds=1, events=1
    )
    rent = cluster.usd_per_hour * 10 / 3600
    assert result.usd_per_step - rent == pytest.approx(50 * 7.2 / 3600)
