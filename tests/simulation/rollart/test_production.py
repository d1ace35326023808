import pytest

from tasks.simulation.result import SimulationResult
from tasks.simulation.rollart import production
from tasks.simulation.rollart.production import production_campaign, production_cluster


def test_the_week_has_the_published_limits() -> None:
    for domain in production.WEEK.values():
        assert domain.prompt_tokens.quantile(1 - 1e-9) <= production.PROMPT
        assert domain.response_tokens.quantile(1 - 1e-9) <= production.RESPONSE
    assert all(row.met for row in production.shape_rows())


@pytest.mark.parametrize("part", [1, 4, production.SMALLEST_PART])
def test_a_part_has_the_load_of_the_whole(part: int) -> None:
    whole, share = production_cluster(1), production_cluster(part)
    (engines,) = share.rollout
    assert engines.engines * part == whole.rollout[0].engines == 320
    assert share.train.devices * part == whole.train.devices == 512
    assert production_campaign(part).train.groups * part == production_campaign(1).train.groups
    assert share.weights == whole.weights


def test_the_whole_has_over_3000_gpus_of_which_a_sixth_trains() -> None:
    used = production_cluster(1).devices_used
    assert used["h800"] + used["h20"] > 3000
    assert used["h20"] / used["h800"] == 5


def _result(rows: list[dict[str, float]]) -> SimulationResult:
    return SimulationResult(
        rows=rows,
        warm_up_steps=1,
        step_seconds=0,
        tokens_per_s=0,
        stage_seconds={},
        utilisation={},
        usd_per_step=0,
        h20_hours_per_step=0,
        staleness=[],
        staleness_mean=0,
        wasted_share=0,
        virtual_seconds=0,
        wall_seconds=0,
        events=0,
    )


def test_the_trainer_is_idle_while_nothing_of_a_step_is_its_own() -> None:
    rows = [
        {"seconds/step": 1.0},
        {"seconds/step": 100.0, "seconds/train_step": 60.0, "seconds/update": 2.0, "seconds/get_batch": 90.0},
        {"seconds/step": 50.0, "seconds/train_step": 50.0},
    ]
    assert production.idle_shares(_result(rows)) == [pytest.approx(0.38), pytest.approx(0.0)]
