import math

import pytest

from infra.hardware import hardware
from tasks.simulation.rollart import affinity
from tasks.simulation.rollart.clusters import ROLLOUT_TP


def test_the_clusters_cost_the_same() -> None:
    # §7.3: 205.2, 208 and 206.4 in hours of an H20.
    costs = {
        name: sum(hardware(pool).cost * devices for pool, devices in rollout.items())
        for name, rollout in affinity.EQUAL_COST.items()
    }
    assert costs == {
        "H20 only": pytest.approx(208.0),
        "H800 only": pytest.approx(205.2),
        "mixed": pytest.approx(206.4),
    }


@pytest.mark.parametrize("shares", [affinity.SHARES, affinity.SMALLEST_SHARES])
def test_a_part_has_whole_engines_and_whole_groups(shares: dict[str, int]) -> None:
    for model, share in shares.items():
        assert affinity.TRAJECTORIES % share == affinity.PROMPTS % share == 32 % share == 0
        for rollout in affinity.EQUAL_COST.values():
            assert all(devices % (share * ROLLOUT_TP[model]) == 0 for devices in rollout.values())


def test_more_of_the_same_gpus_generate_faster() -> None:
    two = affinity._rollout_seconds("gem_math", "h20", 2, 64, 1)
    six = affinity._rollout_seconds("gem_math", "h20", 6, 64, 1)
    assert six < two


@pytest.mark.slow
def test_both_comparisons_have_their_rows_and_say_what_is_not_rollout() -> None:
    rows = affinity.step_times(["8B"], 2, affinity.SMALLEST_SHARES)
    assert [row.published for row in rows] == [1.30, 1.68, 1.12, 1.37]
    assert all(math.isfinite(row.ours) and row.ours > 0 for row in rows)
    assert all("of a step" in row.note for row in rows)
