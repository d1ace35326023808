from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.campaign import Campaign, CampaignError

LAPTOP = Path(__file__).parent.parent / "flows/campaigns/laptop.yaml"


def minimal(**changes: Any) -> dict[str, Any]:
    return {"name": "small", "domains": {"sums": {"source": "reasoning_gym"}}, **changes}


def problem(data: Any) -> str:
    with pytest.raises(CampaignError) as raised:
        Campaign.parse(data)
    return str(raised.value)


@pytest.mark.parametrize("file", sorted(LAPTOP.parent.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_campaign_file_that_is_shipped_is_valid(file: Path) -> None:
    assert Campaign.load(file).name == file.stem


def test_what_is_dumped_is_the_same_campaign() -> None:
    loaded = Campaign.load(LAPTOP)
    assert Campaign.parse(yaml.safe_load(loaded.dump())) == loaded


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (minimal(trian={}), ["trian", "no such option"]),
        (minimal(train={"groups": "many"}), ["train.groups", "integer", "many"]),
        (minimal(train={"learning_rate": 1}), ["train.learning_rate", "no such option"]),
        (
            minimal(train={"group_size": 8, "batch_trajectories": 60}),
            ["batch_trajectories (60)", "group_size"],
        ),
        (minimal(train={"groups": 4, "batch_trajectories": 64}), ["groups x group_size", "4 x 8"]),
        (minimal(train={"mode": "sync"}), ["alpha", "mode"]),
        (minimal(train={"mode": "tutti", "alpha": 0}), ["alpha", "mode"]),
        (minimal(train={"mode": "turbo"}), ["train.mode", "turbo"]),
        (
            minimal(train={"mode": "sync", "alpha": 0}, environment={"concurrent_trajectories": 63}),
            ["concurrent_trajectories (63)", "64", "sync_plus"],
        ),
        (minimal(train={"groups": 3, "trainer": {"mini_batches": 2}}), ["groups (3)", "mini_batches"]),
        (minimal(train={"algorithm": {"dual_clip": 0.5}}), ["dual_clip"]),
        (minimal(train={"algorithm": {"aggregation": "sequence_sum_constant"}}), ["aggregation_constant"]),
        (minimal(domains={}), ["domains"]),
        (minimal(domains={"a": {}}), ["domains.a.source"]),
        (minimal(domains={"a": {"source": "gem", "weight": 0}}), ["domains.a.weight"]),
        (
            minimal(domains={"a": {"source": "gem", "max_tokens": 8}}),
            ["max_turn_tokens (16)", "max_tokens (8)"],
        ),
        (
            minimal(domains={"a": {"source": "gem", "max_tokens": 900}}),
            ["domains.a.max_tokens", "max_context"],
        ),
        (minimal(domains={"a": {"source": "gem", "reward_range": [1, 0]}}), ["reward_range"]),
        (minimal(model={"build": {"hidden_size": 100, "heads": 7}}), ["hidden_size", "heads"]),
        (minimal(name="Bad Name"), ["name"]),
        ("just text", ["campaign"]),
    ],
)
def test_an_impossible_campaign_is_one_error_that_names_the_option(data: Any, names: list[str]) -> None:
    message = problem(data)
    for name in names:
        assert name in message


def test_prompts_times_members_may_exceed_what_either_is_alone() -> None:
    assert Campaign.parse(minimal(train={"groups": 32, "group_size": 8, "batch_trajectories": 256}))


def test_overrides_reach_into_the_tree_and_are_validated() -> None:
    loaded = Campaign.load(LAPTOP, ["train.steps=3", "domains.sums.weight=2.5"])
    assert loaded.train.steps == 3
    assert loaded.domains["sums"].weight == 2.5
    with pytest.raises(CampaignError, match=r"train\.stepz"):
        Campaign.load(LAPTOP, ["train.stepz=3"])
    with pytest.raises(CampaignError, match="option=value"):
        Campaign.load(LAPTOP, ["train.steps"])


def test_a_file_that_is_missing_or_not_yaml_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(CampaignError, match="cannot read"):
        Campaign.load(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(CampaignError, match="not YAML"):
        Campaign.load(tmp_path / "bad.yaml")


def test_a_campaign_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Campaign.load(LAPTOP).train.steps = 3  # type: ignore[misc]
