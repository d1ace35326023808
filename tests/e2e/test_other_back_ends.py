"""The same loop on the parts of a cluster: weights over Mooncake, rewards on a function service."""

from pathlib import Path

import pytest

from blocks.weight_store import open_weight_store
from tasks.report.run_files import RunFiles
from tasks.run_folder import RunFolder
from tasks.weights.publication import read_publication
from tests.e2e.campaigns import SUMS, manifests_of, small_campaign
from tests.e2e.drive import drive
from tests.mooncake import fresh_url, skip_without_mooncake

pytestmark = pytest.mark.slow


async def test_engines_take_deltas_of_the_weights_from_mooncake(model: Path, tmp_path: Path) -> None:
    skip_without_mooncake()
    campaign = small_campaign(
        model,
        tmp_path,
        train={"steps": 3, "mode": "sync", "alpha": 0},
        stores={"runs": str(tmp_path), "weights": fresh_url()},
        weights={"delta": True},
    )
    await drive(campaign, "run")
    for row in RunFiles(tmp_path / "run").read_metrics():
        assert row["train/kl_behaviour"] == pytest.approx(0, abs=1e-6)
        assert row["train/importance_max"] == pytest.approx(1, abs=1e-3)
    store = open_weight_store(RunFolder.of(campaign, "run").weights_url)
    newest = store.newest()
    assert newest == 3
    assert read_publication(store, newest).base is not None


async def test_rewards_of_a_campaign_are_judged_by_remote_functions(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lithops")
    pids = tmp_path / "pids"
    pids.mkdir()
    monkeypatch.setenv("TUTTI_TEST_REWARD_PIDS", str(pids))
    campaign = small_campaign(
        model,
        tmp_path,
        train={"steps": 2},
        domains={"sums": {**SUMS, "reward": "tests.e2e.remote_reward:even_length"}},
        reward={"serverless": {"backend": "localhost"}},
    )
    await drive(campaign, "run")
    manifests = manifests_of(campaign, "run")
    assert len(manifests) == 2
    assert {entry.reward for manifest in manifests for entry in manifest.trajectories} == {0.0, 1.0}
    assert len(list(pids.iterdir())) >= 1, "no reward was judged where the function service runs"
