"""What the profile of a run does after a step, with a fleet whose counters and engines the test sets."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from infra.model_size import PUBLIC, ModelSize
from tasks.bindings import BindingsFile
from tasks.campaign import Campaign
from tasks.rollout.affinity import bind_domains, domain_manager
from tasks.rollout.affinity_driver import AffinityDriver, most_running
from tasks.train.manifests import BatchManifest, ManifestEntry


class SetFleet:
    def __init__(self) -> None:
        self.done: Counter[str] = Counter(prefill_tokens=0, recomputed_tokens=0, decode_tokens=0)
        self.serving = ["fast", "fast", "wide", "wide", "wide", "wide", "wide", "wide"]
        self.bound: list[dict[str, str]] = []

    async def counters(self) -> Counter[str]:
        return Counter(self.done)

    async def serving_pools(self) -> list[str]:
        return self.serving

    async def rebind(self, affinity: Mapping[str, str]) -> None:
        self.bound.append(dict(affinity))


def campaign(**affinity: Any) -> Campaign:
    return Campaign.parse(
        {
            "name": "profiled",
            "domains": {"lake": {"source": "gem"}, "math": {"source": "gem"}},
            "rollout": {"engine": {"kind": "torch", "workers": 8}},
            "train": {"groups": 16, "group_size": 8},
            "affinity": {
                "local_pools": {"fast": "h800", "wide": "h20"},
                "domains": {"lake": "wide", "math": "fast"},
                **affinity,
            },
        }
    )


def driver(of: Campaign, fleet: SetFleet, folder: Path) -> AffinityDriver:
    file = BindingsFile(folder)
    manager = domain_manager(of, ("fast", "wide"), file)
    bind_domains(of, manager, file)
    return AffinityDriver(of, fleet, manager, file, ModelSize.of(PUBLIC["Qwen3-8B"]))


def batch(step: int) -> BatchManifest:
    """64 prefill-heavy trajectories of many turns, and 64 decode-heavy ones of few."""
    shapes = [("lake", 8000, 600, 20)] * 64 + [("math", 4000, 3600, 2)] * 64
    return BatchManifest(
        step=step,
        epoch=1,
        trajectories=[
            ManifestEntry(
                name=f"g{step:08d}-m{index:03d}-a00",
                version=step,
                oldest_version=step,
                domain=domain,
                group=step,
                reward=0.0,
                turns=turns,
                tokens=tokens,
                sampled_tokens=sampled,
            )
            for index, (domain, tokens, sampled, turns) in enumerate(shapes)
        ],
    )


async def test_applied_it_rebinds_once_it_has_advised_the_same_often_enough(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = SetFleet()
    profile = driver(campaign(profile="apply", patience=2), fleet, tmp_path)
    await profile.step(batch(0))
    assert fleet.bound == []
    assert profile.mapping == {"lake": "wide", "math": "fast"}
    for step in (1, 2, 3):
        await profile.step(batch(step))
    assert fleet.bound == [{"lake": "fast", "math": "wide", "default": "wide"}]
    record = BindingsFile(tmp_path).read()
    assert [change["step"] for change in record.changes] == [1]
    assert record.advice is not None
    assert (record.advice["step"], record.advice["gain"]) == (3, 0)
    rebound = [line.getMessage() for line in caplog.records if "re-binds" in line.getMessage()]
    assert len(rebound) == 1
    assert "lake: 20.0 turns, 92% prefill" in rebound[0]


async def test_it_only_recommends_where_that_is_all_it_may(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = SetFleet()
    profile = driver(campaign(profile="recommend", patience=1), fleet, tmp_path)
    for step in range(3):
        await profile.step(batch(step))
    assert fleet.bound == []
    assert profile.advice is not None
    assert profile.advice.mapping == {"lake": "fast", "math": "wide"}
    assert sum("recommends lake on fast, math on wide" in line.getMessage() for line in caplog.records) == 1


async def test_switched_off_it_asks_nothing(tmp_path: Path) -> None:
    profile = driver(campaign(), SetFleet(), tmp_path)
    assert await profile.step(batch(0)) is None
    assert BindingsFile(tmp_path).read().advice is None


async def test_a_pool_whose_engines_are_gone_is_not_advised(tmp_path: Path) -> None:
    fleet = SetFleet()
    fleet.serving = ["wide"] * 6
    profile = driver(campaign(profile="apply", patience=1), fleet, tmp_path)
    await profile.step(batch(0))
    assert profile.advice is not None
    assert set(profile.advice.mapping.values()) <= {"wide", "*"}
    assert {row["pool"] for row in profile.advice.rows} == {"wide"}


async def test_prefill_that_a_weight_update_made_again_says_nothing_of_the_domains(tmp_path: Path) -> None:
    fleet = SetFleet()
    profile = driver(campaign(profile="recommend"), fleet, tmp_path)
    written, sampled = 64 * (7400 + 400), 64 * (600 + 3600)
    fleet.done.update(prefill_tokens=written + 5000, recomputed_tokens=5000, decode_tokens=sampled)
    given = await profile.step(batch(0))
    assert given is not None
    assert given.rows[0]["prefilled"] == pytest.approx(7400)


def test_an_engine_runs_its_share_of_what_may_be_in_flight() -> None:
    # 16 groups of 8, and as many of the next version at alpha 1: 256 over 8 engines
    assert campaign().train.alpha == 1
    assert most_running(campaign(), 8) == 32
    assert most_running(campaign(), 1) == 64  # max_running
    assert most_running(campaign(), 1000) == 1
