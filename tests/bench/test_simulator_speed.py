import pytest

from tasks.simulation.speed_figure import SpeedPoint
from tests.bench.simulator_speed import measure, row_of


def point(gpus: int, trajectories: int, cpu_seconds: float) -> SpeedPoint:
    return SpeedPoint(gpus, trajectories, 2, 10 * trajectories, cpu_seconds, 2 * cpu_seconds, 1e3, 10**5, 512)


def test_the_row_holds_the_largest_simulation_to_a_minute() -> None:
    points = [point(3072, 512, 5.0), point(384, 512, 4.0), point(3072, 4096, 66.0)]
    row = row_of(points)
    assert (row.ours, row.met) == (66.0, False)
    assert row.ratio == pytest.approx(1.1)
    assert row_of(points[:2]).met


def test_a_point_is_a_simulation_of_the_production_campaign_and_counts_a_step() -> None:
    few = measure(batch_part=128, cluster_part=8, steps=2)
    assert (few.trajectories, few.steps) == (32, 2)
    assert few.gpus == 3072 // 8
    assert few.turns >= few.trajectories  # each has a turn at least
    assert few.events > few.turns
    assert min(few.cpu_seconds, few.wall_seconds, few.virtual_seconds, few.memory_mb) > 0
