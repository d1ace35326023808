"""Each mode of the loop for a few steps, every part real."""

from pathlib import Path

import pytest

from infra.object_store import ObjectStore
from tasks.campaign import Campaign
from tasks.report.run_files import RunFiles
from tasks.run_folder import RunFolder
from tasks.train.archive import archived_steps, read_archive
from tasks.train.modes import MODES, ModeName
from tasks.trajectory import Trajectory
from tests.e2e.campaigns import manifests_of, slow_turns, small_campaign
from tests.e2e.drive import drive

pytestmark = pytest.mark.slow

STEPS = 4
LATENCY_S = 0.4


def campaign_in(mode: ModeName, model: Path, runs: Path) -> Campaign:
    """Two groups of two: a domain whose environment is slow and goes on for longer, and a quick one."""
    return small_campaign(
        model,
        runs,
        domains={
            "slow": slow_turns(latency_ms=1000 * LATENCY_S, turns=3),
            "quick": slow_turns(latency_ms=5, turns=2),
        },
        train={
            "steps": STEPS,
            "groups": 2,
            "group_size": 2,
            "mode": mode,
            "alpha": MODES[mode].lowest_alpha,
        },
    )


def trained(campaign: Campaign) -> list[list[Trajectory]]:
    store = ObjectStore(RunFolder.of(campaign, "run").samples_url)
    assert archived_steps(store) == list(range(STEPS))
    return [read_archive(store, step) for step in range(STEPS)]


def ages(step: int, trajectories: list[Trajectory]) -> set[int]:
    """Staleness of every sampled token of a batch."""
    return {step - int(version) for each in trajectories for version in each.versions[each.loss_mask]}


@pytest.mark.parametrize("mode", ["sync", "sync_plus", "one_off", "areal", "tutti"])
async def test_a_mode_keeps_its_staleness(model: Path, tmp_path: Path, mode: ModeName) -> None:
    campaign = campaign_in(mode, model, tmp_path)
    await drive(campaign, "run")
    assert [manifest.step for manifest in manifests_of(campaign, "run")] == list(range(STEPS))
    batches = trained(campaign)
    assert all(len(batch) == 4 for batch in batches)
    of_batches = [ages(step, batch) for step, batch in enumerate(batches)]
    if mode in ("sync", "sync_plus"):
        assert of_batches == [{0}] * STEPS
    if mode == "one_off":
        assert of_batches == [{0}, *[{1}] * (STEPS - 1)]
    if mode == "tutti":
        assert set().union(*of_batches) <= {0, 1}
    assert min(set().union(*of_batches)) >= 0
    for step, row in enumerate(RunFiles(tmp_path / "run").read_metrics()):
        oldest = [max(ages(step, [trajectory])) for trajectory in batches[step]]
        histogram = row["staleness/histogram"]
        assert [oldest.count(age) for age in range(len(histogram))] == histogram
        assert sum(histogram) == 4
    if mode == "sync":
        check_lockstep(batches, RunFiles(tmp_path / "run"))


def check_lockstep(batches: list[list[Trajectory]], files: RunFiles) -> None:
    """A quick environment's next turn waited for the slow one, and its reward for the slow one's last turn.

    Answers of a round are given out together, so from one to the next a slow step lies between for all. Half
    of it is asked for, because news travel between processes.
    """
    for batch in batches:
        quick = [trajectory for trajectory in batch if trajectory.domain == "quick"]
        assert len(quick) == 2
        for trajectory in quick:
            first, second = trajectory.turns
            assert first.environment_seconds + second.generate_seconds > LATENCY_S / 2
    ends = [row for row in files.read_ends() if row["domain"] == "quick"]
    assert len(ends) == 2 * STEPS
    assert all(row["seconds"] > 2 * LATENCY_S for row in ends)  # three slow steps; two without this wait


async def test_a_group_past_its_deadline_is_replaced_and_the_step_goes_on(
    model: Path, tmp_path: Path
) -> None:
    """Of some seeds the step takes for ever, and its own limit is far away."""
    hangs = {
        "source": "tests.e2e.straggler:Straggler",
        "max_turns": 1,
        "max_turn_tokens": 6,
        "max_tokens": 32,
        "step_limit_s": 600,
    }
    campaign = small_campaign(
        model,
        tmp_path,
        seed=7,  # of the first four groups, the third hangs
        domains={"straggler": hangs},
        train={"steps": 1, "groups": 4, "group_size": 2, "group_deadline_s": 15.0},
    )
    await drive(campaign, "run")
    (manifest,) = manifests_of(campaign, "run")
    assert len(manifest.trajectories) == 8
    assert manifest.counts["groups/overdue"] >= 1
    assert 2 in manifest.retired_groups
