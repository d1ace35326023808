"""The what-if flow and the plan of a campaign, on real simulations."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cluster_file import cluster_file
from flows.plan import plan_campaign
from flows.preparation import require_parts
from flows.simulate import budget, main
from tasks.campaign import Campaign, CampaignError
from tasks.report.plan_section import read_plan
from tasks.run_folder import RunFolder
from tasks.simulation.cluster import ClusterConfig
from tasks.simulation.fitting import fit
from tasks.simulation.what_if.plan import PlanRefused, make_plan, require_plan
from tasks.simulation.what_if.plan_config import PlanConfig
from tests.e2e.campaigns import saved, small_campaign
from tests.flows.cluster_files import cluster_for
from tests.flows.prefect_runs import PrefectApi
from tests.simulation.small import campaign_data, cluster_data

ROOT = Path(__file__).parents[2]
SHIPPED = {"laptop": "laptop", "node": "agents", "rollart": "agents"}
"""Cluster files, each with the campaign that it is for."""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    campaign, cluster = tmp_path / "campaign.yaml", tmp_path / "few.yaml"
    campaign.write_text(yaml.safe_dump({**campaign_data(), "stores": {"runs": str(tmp_path / "runs")}}))
    cluster.write_text(yaml.safe_dump(cluster_data()))
    return campaign, cluster


def test_every_cluster_file_that_is_shipped_fits_its_campaign() -> None:
    folder = ROOT / "flows/clusters"
    assert {file.stem for file in folder.glob("*.yaml")} == set(SHIPPED)
    for name, campaign in SHIPPED.items():
        cluster = ClusterConfig.load(folder / f"{name}.yaml")
        assert cluster.name == name
        assert fit(Campaign.load(ROOT / f"flows/campaigns/{campaign}.yaml"), cluster).engines
        assert ClusterConfig.parse(cluster_file(str(folder / f"{name}.yaml"))["cluster"]) == cluster


@pytest.mark.slow
def test_the_best_of_several_candidates_is_found_from_the_command_line(
    prefect_server: dict[str, str], files: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "answer"
    command = ["--vary", "cluster.rollout.0.max_running=1,64", "--vary", "cluster.model=qwen3-1.7b,qwen3-32b"]
    more = ["--budget", "100/hour", "--steps", "1", "--out", str(out), "--processes", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "flows.simulate", *map(str, files), *command, *more],
        env=prefect_server,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "best: rollout.0.max_running=64, model=qwen3-1.7b" in done.stdout + done.stderr
    answer = json.loads((out / "answer.json").read_text())
    assert answer["size"] == 4
    first, second, *others = answer["candidates"]
    assert first["best"]
    assert first["prediction"]["step_seconds"] < second["prediction"]["step_seconds"]
    assert {each["prediction"] for each in others} == {None}
    assert all("does not fit" in each["verdict"] for each in others)
    assert "<html" in (out / "what_if.html").read_text()[:500]
    assert "<html" in (out / "best/report.html").read_text()[:500]
    api = PrefectApi(prefect_server["PREFECT_API_URL"])
    shown = {f"small-what-if{part}" for part in ("", "-pareto", "-timeline", "-report")}
    keys = {"artifacts": {"key": {"any_": sorted(shown)}}}
    assert {artifact["key"] for artifact in api.post("artifacts/filter", keys)} == shown
    runs = api.post("task_runs/filter", {"task_runs": {"name": {"like_": "simulate "}}})
    assert [run["state_type"] for run in runs] == ["COMPLETED"] * 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--vary", "train.alpha"], "option=value"),
        (["--vary", "cluster.rollout.5.devices=1,2"], "cluster.rollout.5.devices"),
        (["--budget", "100"], "no budget"),
        (["train.alhpa=1"], "train.alhpa"),
        (["cluster.pools.gpus.devices=3"], "pools.gpus.devices (3) is below the 4"),
        (["cluster.model=llama-3.1-70b"], "does not fit"),
        (["--vary", "cluster.model=llama-3.1-70b,qwen3-235b-a22b"], "no candidate can run"),
        (["--budget", "1/hour"], "over the budget of 1"),
        (["--most", "0"], "greater than 0"),
        (["--workload-from", "no-such-run"], "the trace has holes"),
    ],
)
def test_bad_input_is_one_error_and_starts_nothing(
    files: tuple[Path, Path], arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*map(str, files), *arguments]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told
    assert sorted(path.name for path in files[0].parent.iterdir()) == ["campaign.yaml", "few.yaml"]


def test_a_budget_is_by_the_hour_or_by_the_step() -> None:
    assert budget("400/hour") == {"usd_per_hour": 400}
    assert budget("2.5/step") == {"usd_per_step": 2.5}
    for text in ("400", "400/day", "much/hour"):
        with pytest.raises(ValueError, match=r"budget|float"):
            budget(text)


def planned(model: Path, folder: Path, **limits: float) -> tuple[Campaign, PlanConfig, RunFolder]:
    plan = {"cluster": str(cluster_for(model, folder)), "steps": 1, **limits}
    trackers = {"prefect_artifacts": False}
    campaign = small_campaign(model, folder, train={"steps": 3}, plan=plan, trackers=trackers)
    assert campaign.plan is not None
    run = RunFolder.of(campaign, "run")
    run.begin(campaign, resume=False)
    return campaign, campaign.plan, run


async def test_a_plan_is_kept_with_the_run_and_made_once(model: Path, tmp_path: Path) -> None:
    campaign, plan, folder = planned(model, tmp_path)
    told = await plan_campaign.fn(campaign, plan, folder)
    assert "predicted on cluster cores" in told
    kept = read_plan(folder.root)
    assert kept is not None
    assert kept["measures"]["steps"] == kept["prediction"]["steps"] == 1
    assert kept["measures"]["step_seconds"] == pytest.approx(kept["prediction"]["step_seconds"], rel=1e-6)
    assert kept["usd"] == pytest.approx(3 * kept["prediction"]["usd_per_step"])
    assert kept["campaign_steps"] == 3
    assert sorted(path.name for path in folder.root.iterdir()) == ["campaign.yaml", "logs", "plan.json"]
    (folder.root / "plan.json").write_text(json.dumps({**kept, "cluster": "another"}))
    assert "cluster another" in await plan_campaign.fn(campaign, plan, folder)


async def test_a_plan_over_its_limit_refuses_the_run_and_again_when_it_is_resumed(
    model: Path, tmp_path: Path
) -> None:
    campaign, plan, folder = planned(model, tmp_path, max_step_seconds=1e-6, max_usd_per_hour=0.01)
    for _ in range(2):
        with pytest.raises(PlanRefused) as raised:
            await plan_campaign.fn(campaign, plan, folder)
        told = str(raised.value)
        assert "plan.max_step_seconds (1e-06) is below the predicted" in told
        assert "plan.max_usd_per_hour (0.01) is below the predicted 0.64 USD" in told
        assert "max_usd (" not in told


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"warm_up_steps": 3}, r"plan\.warm_up_steps \(3\).*train\.steps \(3\)"),
        ({"cluster": "no-such-file.yaml"}, r"plan\.cluster: cannot read"),
    ],
)
def test_a_plan_that_cannot_be_made_is_an_error_of_the_campaign_before_it_starts(
    model: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    campaign, plan, _ = planned(model, tmp_path)
    changed = campaign.model_copy(update={"plan": plan.model_copy(update=change)})
    with pytest.raises(CampaignError, match=says):
        require_parts(changed)


def test_a_cluster_without_the_campaigns_domains_cannot_plan_it(model: Path, tmp_path: Path) -> None:
    campaign, plan, _ = planned(model, tmp_path)
    cluster_for(model, tmp_path, workload={"web": {"prompt_tokens": 9, "response_tokens": 9}})
    with pytest.raises(CampaignError, match=r"(?s)plan\.cluster.*sums, turns"):
        require_plan(campaign, plan)


async def test_of_a_very_short_campaign_the_last_step_is_predicted(model: Path, tmp_path: Path) -> None:
    campaign, plan, _ = planned(model, tmp_path)
    train = campaign.train.model_copy(update={"steps": 2})
    made = await asyncio.to_thread(make_plan, campaign.model_copy(update={"train": train}), plan)
    assert (made.warm_up_steps, made.prediction.steps) == (1, 1)


@pytest.mark.slow
def test_a_refused_campaign_ends_before_its_model_is_built(
    prefect_server: dict[str, str], model: Path, tmp_path: Path
) -> None:
    plan = {"cluster": str(cluster_for(model, tmp_path)), "steps": 1, "max_usd": 1e-9}
    file = saved(small_campaign(model, tmp_path / "runs", train={"steps": 3}, plan=plan), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "flows.campaign", str(file), "--run", "dear"],
        env=prefect_server,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-3000:]
    assert "plan.max_usd (1e-09) is below the predicted" in done.stderr
    assert (tmp_path / "runs/dear/plan.json").exists()
    assert not (tmp_path / "runs/dear/metrics.jsonl").exists()
