from pathlib import Path

import plotly.graph_objects as go
import pytest

from tasks.simulation.speed_figure import SpeedPoint, growth, read_points, write_points


def point(gpus: int, trajectories: int, cpu_seconds: float) -> SpeedPoint:
    return SpeedPoint(gpus, trajectories, 2, 10 * trajectories, cpu_seconds, 2 * cpu_seconds, 1e3, 10**5, 512)


POINTS = [
    point(3072, 2048, 19.0),
    point(384, 512, 3.0),
    point(3072, 512, 4.0),
    point(1536, 512, 3.5),
    point(3072, 1024, 9.0),
]


def test_growth_is_drawn_by_trajectories_on_the_largest_cluster_and_by_gpus_with_the_smallest_batch() -> None:
    by_trajectories, by_gpus, proportional = growth(POINTS)["data"]
    assert (by_trajectories["x"], by_trajectories["y"]) == ([512, 1024, 2048], [4.0, 9.0, 19.0])
    assert (by_gpus["x"], by_gpus["y"]) == ([384, 1536, 3072], [3.0, 3.5, 4.0])
    # Four times the trajectories of the first point, at its time for each.
    assert (proportional["x"], proportional["y"]) == ([512, 2048], pytest.approx([4.0, 16.0]))


def test_plotly_takes_the_figure() -> None:
    assert len(go.Figure(growth(POINTS)).data) == 3


def test_points_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_points(POINTS, tmp_path / "runs" / "speed.json")
    assert read_points(tmp_path / "runs" / "speed.json") == POINTS
