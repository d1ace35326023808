"""The whole loop, every part real, for a few steps."""

from pathlib import Path

import duckdb
import psutil
import pytest

from tasks.report.run_files import RunFiles
from tests.e2e.campaigns import manifests_of, slow_turns, small_campaign
from tests.e2e.drive import drive

pytestmark = pytest.mark.slow


async def test_overlapping_training_keeps_every_promise(model: Path, tmp_path: Path) -> None:
    """Staleness, stamps, redundancy, quotas and accounting of a real run with work in flight over updates."""
    campaign = small_campaign(
        model,
        tmp_path,
        train={"steps": 8, "alpha": 2, "redundancy": {"groups": 1, "members": 1}},
        domains={"turns": slow_turns(latency_ms=200), "more": slow_turns(latency_ms=5, turns=2)},
    )
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    await drive(campaign, "run")

    manifests = manifests_of(campaign, "run")
    assert [manifest.step for manifest in manifests] == list(range(8))
    names = [name for manifest in manifests for name in manifest.names]
    assert len(names) == len(set(names)) == 8 * 16
    for manifest in manifests:
        domains = [entry.domain for entry in manifest.trajectories]
        assert domains.count("turns") == domains.count("more") == 8

    archive = tmp_path / "run/samples/archive/*.parquet"
    rows = duckdb.sql(f"select * from '{archive}'").fetchdf()
    assert len(rows) == 8 * 16
    assert rows.staleness.between(0, 2).all()
    assert (rows.step - rows.staleness == rows.oldest_version).all()
    stamped_within_a_trajectory = rows.versions.map(lambda versions: len({v for v in versions if v >= 0}))
    assert stamped_within_a_trajectory.max() > 1, "no trajectory was in flight over an update"

    metrics = RunFiles(tmp_path / "run").read_metrics()
    assert [row["version"] for row in metrics] == list(range(1, 9))
    assert sum(row.get("tokens/wasted/cancelled", 0) for row in metrics) > 0
    assert all(row["seconds/train_step"] > 0 and row["train/loss"] is not None for row in metrics)
    stages = {span.stage for span in RunFiles(tmp_path / "run").read_spans()}
    assert stages >= {"get_batch", "suspend", "update", "resume", "recompute", "train_step", "publish"}
    after = {process.pid for process in psutil.Process().children(recursive=True)} - before
    left = [p for p in map(psutil.Process, after) if "resource_tracker" not in " ".join(p.cmdline())]
    assert left == []


@pytest.mark.parametrize("delta", [False, True])
async def test_sync_training_is_on_policy(model: Path, tmp_path: Path, delta: bool) -> None:
    campaign = small_campaign(
        model,
        tmp_path,
        train={"steps": 3, "mode": "sync", "alpha": 0},
        weights={"delta": delta, "snapshot_every": 2},
    )
    await drive(campaign, "run")
    for manifest in manifests_of(campaign, "run"):
        assert {entry.oldest_version for entry in manifest.trajectories} == {manifest.step}
    for row in RunFiles(tmp_path / "run").read_metrics():
        assert row["train/kl_behaviour"] == pytest.approx(0, abs=1e-6)
        assert row["train/importance_max"] == pytest.approx(1, abs=1e-3)


async def test_faults_of_environments_and_rewards_end_their_trajectories_and_not_the_run(
    model: Path, tmp_path: Path
) -> None:
    troubled = {"max_turns": 1, "max_turn_tokens": 6, "max_tokens": 32, "step_limit_s": 0.5}
    campaign = small_campaign(
        model,
        tmp_path,
        train={"steps": 3},
        domains={
            "environment": {"source": "tests.e2e.troubled:Troubled", **troubled},
            "reward": {
                "source": "tests.bench.domains:Sums",
                "reward": "tests.e2e.troubled:raises_at_times",
                **troubled,
            },
        },
    )
    await drive(campaign, "run")
    manifests = manifests_of(campaign, "run")
    assert len(manifests) == 3
    counts = [manifest.counts for manifest in manifests]
    assert sum(count.get("outcomes/environment_error", 0) for count in counts) > 0
    assert sum(count.get("outcomes/environment_timeout", 0) for count in counts) > 0
    assert sum(count.get("failures", 0) for count in counts) > 0
