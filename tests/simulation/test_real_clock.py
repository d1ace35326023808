"""The virtual clock decides nothing: the same run on the real clock makes the same batches."""

import asyncio
from pathlib import Path

import pytest

from blocks.sample_buffer import SampleBuffer
from infra.object_store import ObjectStore
from infra.performance.calibrated import Calibration, Fitted
from infra.virtual_time import run_virtual
from tasks.campaign import Campaign
from tasks.simulation.fitting import fit
from tasks.simulation.session import open_simulation
from tasks.train.loop import directly, train_loop
from tasks.train.manifests import BatchManifest, read_manifests
from tasks.train.modes import ModeName
from tests.simulation.small import campaign_data, small_cluster

WORK = {
    "prompt_tokens": {"uniform": {"low": 10, "high": 30}},
    "turns": {"uniform": {"low": 1, "high": 3}},
    "response_tokens": {"uniform": {"low": 2, "high": 20}},
    "step_s": {"uniform": {"low": 0.0, "high": 0.1}},
    "step_failure": 0.1,
}


async def batches(of: Campaign, root: Path, coefficients: Path) -> list[BatchManifest]:
    cluster = small_cluster(model="smollm2-135m", workload={"math": WORK}, coefficients=str(coefficients))
    async with open_simulation(fit(of, cluster), root) as (session, _):
        await train_loop(session, directly(session))
        return list(read_manifests(SampleBuffer(ObjectStore(session.folder.samples_url))).values())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync_plus", "one_off"])
def test_the_real_clock_makes_the_same_batches(mode: ModeName, tmp_path: Path) -> None:
    """In modes whose batches hold all that was begun, so that a busy machine does not choose among them."""
    coefficients = tmp_path / "quick.json"
    quick = Fitted(training={"step_s": 0.01})
    Calibration(name="quick", fitted_on="nothing", hardware={"h100": quick}).save(coefficients)
    campaign = Campaign.parse(campaign_data(mode=mode, alpha=0 if mode == "sync_plus" else 1))
    real = asyncio.run(batches(campaign, tmp_path / "real", coefficients))
    virtual = run_virtual(batches(campaign, tmp_path / "virtual", coefficients))
    assert [batch.trajectories for batch in virtual] == [batch.trajectories for batch in real]
    assert [batch.retired_groups for batch in virtual] == [batch.retired_groups for batch in real]
    outcomes = [batch.counts["outcomes/terminated"] for batch in virtual]
    assert outcomes == [batch.counts["outcomes/terminated"] for batch in real]
    assert sum(batch.counts.get("outcomes/environment_error", 0) for batch in virtual) > 0
    assert len(virtual) == 3
