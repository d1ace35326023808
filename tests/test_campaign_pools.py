"""What a campaign may say of its work pools."""

from typing import Any

import pytest

from tasks.campaign import Campaign, CampaignError

POOLS = {"rollout": "h20", "train": "h800", "environment": "cpu", "reward": "cpu"}


def campaign(pools: dict[str, Any] | None, workers: int = 1) -> Campaign:
    return Campaign.parse(
        {
            "name": "pooled",
            "domains": {"sums": {"source": "gem"}},
            "rollout": {"engine": {"kind": "torch", "workers": workers}},
            "pools": pools,
        }
    )


def test_a_campaign_runs_on_this_machine_unless_it_names_pools() -> None:
    assert campaign(None).pools is None


def test_rollout_takes_one_pool_or_several() -> None:
    one = campaign(POOLS).pools
    several = campaign({**POOLS, "rollout": ["h20", "h800"]}, workers=2).pools
    assert one is not None
    assert several is not None
    assert one.rollout == ("h20",)
    assert several.rollout == ("h20", "h800")


def test_each_pool_is_named_once_with_an_option_that_names_it() -> None:
    pools = campaign({**POOLS, "rollout": ["h20", "h800"]}, workers=2).pools
    assert pools is not None
    assert list(pools.names) == ["cpu", "h20", "h800"]
    assert pools.names["cpu"] in ("pools.environment", "pools.reward")
    assert pools.names["h20"] == "pools.rollout"
    assert pools.names["h800"] in ("pools.rollout", "pools.train")


def test_it_survives_being_written_out_and_read() -> None:
    written = campaign({**POOLS, "rollout": ["h20", "h800"]}, workers=2)
    assert Campaign.parse(written.model_dump(mode="json")) == written


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        (
            {**POOLS, "rollout": ["h20", "h800"]},
            r"rollout\.engine\.workers \(1\) is below the number of pools",
        ),
        ({**POOLS, "rollout": []}, r"pools\.rollout"),
        ({**POOLS, "traim": "h800"}, r"pools\.traim: there is no such option"),
        ({"rollout": "h20"}, r"pools\.train"),
    ],
)
def test_what_cannot_work_names_the_option(pools: dict[str, Any], message: str) -> None:
    with pytest.raises(CampaignError, match=message):
        campaign(pools)
