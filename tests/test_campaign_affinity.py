"""What a campaign may say of hardware and affinity."""

from typing import Any

import pytest

from tasks.campaign import Campaign, CampaignError

ROLES = {"rollout": ["h20", "mine"], "train": "h800", "environment": "cpu", "reward": "cpu"}


def campaign(workers: int = 2, **options: Any) -> Campaign:
    return Campaign.parse(
        {
            "name": "affine",
            "domains": {"math": {"source": "gem"}, "swe": {"source": "gem"}},
            "rollout": {"engine": {"kind": "torch", "workers": workers}},
            **options,
        }
    )


def test_a_pools_hardware_is_what_is_said_or_else_what_its_name_says() -> None:
    pools = campaign(pools={**ROLES, "hardware": {"mine": "RTX 4090"}}).pools
    assert pools is not None
    mine, h20 = pools.hardware_of("mine"), pools.hardware_of("h20")
    assert mine is not None
    assert h20 is not None
    assert (mine.name, h20.name) == ("rtx4090", "h20")
    assert pools.hardware_of("unheard-of") is None


def test_roles_that_are_left_out_get_their_worker_classs_pool() -> None:
    pools = campaign(pools={"hardware": {"fast": "H800", "wide": "H20", "boxes": "cpu"}}).pools
    assert pools is not None
    assert pools.rollout == ("wide",)
    assert (pools.train, pools.environment, pools.reward) == ("fast", "boxes", "wide")
    chosen = campaign(pools={"hardware": {"fast": "H800", "wide": "H20"}, "rollout": "fast"}).pools
    assert chosen is not None
    assert chosen.rollout == ("fast",)


def test_prefill_pools_are_among_those_that_get_a_host() -> None:
    pools = campaign(pools={**ROLES, "prefill": "h100"}).pools
    assert pools is not None
    assert pools.prefill == ("h100",)
    assert pools.names["h100"] == "pools.prefill"


def test_local_pools_stand_for_hardware_on_one_machine() -> None:
    local = campaign(affinity={"local_pools": {"fast": "h800", "wide": "h20"}, "domains": {"swe": "fast"}})
    assert {name: entry.name for name, entry in local.rollout_pools.items() if entry} == {
        "fast": "h800",
        "wide": "h20",
    }
    assert Campaign.parse(local.model_dump(mode="json")) == local


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pools": {**ROLES, "hardware": {"mine": "H801"}}}, r"pools\.hardware: mine: .*'H801'.*h20, h800"),
        ({"affinity": {"local_pools": {"a": "H801"}}}, r"affinity\.local_pools: a: .*'H801'"),
        ({"pools": ROLES, "affinity": {"domains": {"sew": "h20"}}}, r"affinity\.domains: 'sew' is no domain"),
        (
            {"pools": ROLES, "affinity": {"domains": {"swe": "h800"}}},
            r"'h800' \(of 'swe'\) is no rollout pool",
        ),
        ({"affinity": {"domains": {"swe": "h20"}}}, "Rollout pools: none"),
        (
            {"pools": ROLES, "affinity": {"local_pools": {"a": "h20"}}},
            r"affinity\.local_pools are for a run on",
        ),
        ({"pools": ROLES, "affinity": {"profile": "apply"}}, r"that of mine is not known: .*pools\.hardware"),
        ({"affinity": {"profile": "recommend"}}, r"there is no named pool: .*affinity\.local_pools"),
        (
            {"affinity": {"local_pools": dict.fromkeys("abc", "h20")}},
            r"workers \(2\) .*affinity\.local_pools \(3\)",
        ),
        ({"affinity": {"declared_by": "Policy.generate"}}, r"affinity\.declared_by"),
    ],
)
def test_what_cannot_work_names_the_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CampaignError, match=message):
        campaign(**options)
