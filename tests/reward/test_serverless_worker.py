"""An environment worker whose campaign names a function service: trajectories are judged there."""

from pathlib import Path

import pytest

from tasks.environment.worker import EnvironmentWorker
from tasks.trajectory import InfraError, Reward, Skip
from tests.environment.test_worker import CAMPAIGN, proxied, run, spec

pytest.importorskip("lithops")


@pytest.mark.slow
async def test_trajectories_are_judged_on_the_service_and_committed(tmp_path: Path) -> None:
    judged = {**CAMPAIGN["domains"]["judged"], "reward": "tests.reward.judgements:obey_remotely"}
    campaign = {
        "name": "test",
        "domains": {"judged": {**judged, "reward_limit_s": 1.0}},
        "reward": {"serverless": {"backend": "localhost", "processes": 2}},
    }
    script = {0: ["0.5"], 1: ["skip"], 2: ["none"], 3: ["0.25"]}
    async with proxied(tmp_path, script) as (_, settings):
        worker = await EnvironmentWorker.start({**settings, "campaign": campaign})
        try:
            headers, _ = await run(worker, [spec(member, "judged") for member in range(4)])
            counts = worker._rewards.serverless_counts
        finally:
            await worker.close()
    assert [header.outcome for header in headers[:2]] == [Reward(0.5), Skip("no gold answer")]
    assert isinstance(headers[2].outcome, InfraError)
    assert headers[3].outcome == Reward(0.25)
    assert [header.name is not None for header in headers] == [True, False, False, True]
    assert counts is not None
    assert counts.asked == 4
