import asyncio
import logging
from pathlib import Path

import httpx
import numpy as np
import pytest
from prefect import flow
from prefect.artifacts import Artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.testing.utilities import prefect_test_harness

from tasks.report import artifacts
from tasks.report.artifacts import CampaignArtifacts, rewards_table, step_markdown
from tasks.report.intervals import mean_interval
from tasks.report.run_files import RunFiles
from tests.report.test_bias import first_of

ROW = {
    "step": 2,
    "version": 3,
    "trajectories": 64,
    "reward/game/mean": 0.5,
    "reward/game/count": 64,
    "staleness/histogram": [16, 48],
    "tokens/trained": 900,
    "tokens/wasted/stale": 100,
    "seconds/train_step": 3.0,
    "seconds/step": 4.0,
}


def test_a_step_is_a_page_of_tables():
    markdown = step_markdown(ROW, 10)
    assert "step 3/10" in markdown
    assert "| game | 0.5000 | 64 |" in markdown
    assert "### Staleness, mean 0.75 versions" in markdown
    assert "| 0 | 16 | ████████ |" in markdown
    assert "| 1 | 48 | ████████████████████████ |" in markdown
    assert "### Wasted tokens, 10.0%" in markdown
    assert "| stale | 100 |" in markdown
    assert "| train_step | 3.00 |" in markdown
    assert "| step |" not in markdown


def test_a_step_shows_ages_of_tokens_waste_by_domain_and_what_rewards_took():
    more = {
        "staleness/tokens": [300, 100],
        "staleness/mixed_share": 0.25,
        "waste/game/stale": 60,
        "waste/web/stale": 40,
        "context/wasted/stale": 250,
        "tokens/recomputed": 30,
        "reward/utilisation": 0.058,
        "reward/calls": 64,
    }
    markdown = step_markdown({**ROW, **more}, 10)
    assert "### Age of tokens, mean 0.25; 25% of several versions" in markdown
    assert "| 1 | 100 | ████████ |" in markdown
    assert "| of game | 60 |" in markdown
    assert "| context stale | 250 |" in markdown
    assert "| context recomputed | 30 |" in markdown
    assert "| utilisation | 0.058 |" in markdown
    assert "| game | 0.5000 | 64 |" in markdown
    assert "utilisation |" not in markdown.split("### Staleness")[0]  # it is no domain


def test_a_step_without_numbers_has_no_tables():
    assert step_markdown({"step": 0}, 10) == "**step 1/10**\n"


def test_rewards_of_a_run_by_domain():
    rows = [{"step": step, "reward/game/mean": step / 100} for step in range(20)]
    rows.append({"step": 20, "reward/math/mean": None})
    assert rewards_table(rows) == [
        {
            "domain": "game",
            "steps": 20,
            "first tenth": 0.005,
            "last tenth": 0.185,
            "best": 0.19,
            "best step": 19,
        }
    ]


async def test_an_api_that_fails_costs_warnings_and_is_then_left_alone(monkeypatch, caplog):
    calls = 0

    async def refuse(*_args, **_kwargs):
        nonlocal calls
        calls += 1
        raise httpx.ConnectError("refused")

    for name in ("acreate_progress_artifact", "acreate_markdown_artifact", "acreate_table_artifact"):
        monkeypatch.setattr(artifacts, name, refuse)
    shown = CampaignArtifacts("c", 10)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            await shown.step(ROW)
        await shown.finish([ROW], Path("report.html"))
    assert calls == artifacts.FAILURES
    assert caplog.messages[-1].endswith("no more are tried in this run")


async def test_an_api_that_hangs_is_not_waited_for(monkeypatch):
    async def hang(*_args, **_kwargs):
        await asyncio.Event().wait()

    monkeypatch.setattr(artifacts, "acreate_table_artifact", hang)
    monkeypatch.setattr(artifacts, "LIMIT_S", 0.05)
    async with asyncio.timeout(5):
        await CampaignArtifacts("c", 10).finish([ROW], None)


async def test_a_cancelled_run_is_not_kept_by_its_artifacts(monkeypatch):
    async def hang(*_args, **_kwargs):
        await asyncio.Event().wait()

    monkeypatch.setattr(artifacts, "acreate_table_artifact", hang)
    showing = asyncio.create_task(CampaignArtifacts("c", 10).finish([ROW], None))
    await asyncio.sleep(0)
    showing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await showing


@pytest.mark.slow
def test_the_dashboard_gets_them_under_stable_keys(tmp_path):
    evaluation = RunFiles(tmp_path).write_evaluation(
        {"game": mean_interval([0] * 50, (0, 1))}, {"game": mean_interval([1] * 50, (0, 1))}
    )

    @flow
    async def campaign():
        shown = CampaignArtifacts("frozen_lake", 4)
        for step in range(3):
            await shown.step({**ROW, "step": step})
        await shown.evaluation({})
        await shown.evaluation(evaluation)
        await shown.finish([ROW], tmp_path / "report.html", first_of(np.random.default_rng(1), 40, 6, 9))

    async def run_and_read():
        await campaign()
        async with get_client() as client:
            (run,) = await client.read_flow_runs()
            of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
            return await client.read_artifacts(artifact_filter=of_run), await Artifact.aget(
                "frozen-lake-progress"
            )

    with prefect_test_harness():
        found, progress = asyncio.run(run_and_read())
    keys = sorted(artifact.key for artifact in found)
    assert keys == [
        "frozen-lake-bias",
        "frozen-lake-evaluation",
        "frozen-lake-progress",
        "frozen-lake-report",
        "frozen-lake-rewards",
        *["frozen-lake-step"] * 3,
    ]
    assert progress.data == 75.0
    assert progress.description.startswith("step 3/4")
    (bias,) = [artifact for artifact in found if artifact.key == "frozen-lake-bias"]
    assert "Accepted trajectories of game are shorter" in bias.data
    assert "| game | sampled tokens | 360 | 33.3% | 240 |" in bias.data
    assert {artifact.key: artifact.type for artifact in found} == {
        "frozen-lake-bias": "markdown",
        "frozen-lake-evaluation": "table",
        "frozen-lake-progress": "progress",
        "frozen-lake-report": "markdown",
        "frozen-lake-rewards": "table",
        "frozen-lake-step": "markdown",
    }
