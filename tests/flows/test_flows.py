"""Every flow, run for real against a Prefect server."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.cluster.config import POOLS, QUEUES
from infra.cluster.work_pools import make_work_pools
from tests.e2e.campaigns import saved, small_campaign
from tests.flows.cluster_files import cluster_for
from tests.flows.test_bound_pools import ONLINE as BOUND_POOLS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


def run(command: list[str], environment: dict[str, str], **options: Any) -> str:
    done = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def known(environment: dict[str, str]) -> dict[str, Any]:
    return json.loads(run([sys.executable, "-m", "tests.flows.ask"], environment).splitlines()[-1])


def test_a_campaign_runs_from_the_command_line_to_its_report(
    prefect_server: dict[str, str], model: Path, tmp_path: Path
) -> None:
    plan = {"cluster": str(cluster_for(model, tmp_path)), "steps": 1}
    campaign = small_campaign(model, tmp_path, train={"steps": 3}, plan=plan)
    file = saved(campaign, tmp_path)
    output = run(
        [sys.executable, "-m", "flows.campaign", str(file), "--run", "first", "train.steps=2"], prefect_server
    )
    assert "sums" in output
    folder = tmp_path / "first"
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert [row["domain"] for row in evaluation["rows"]] == ["sums", "turns"]
    for row in evaluation["rows"]:
        for policy in ("untrained", "trained"):
            assert row[policy]["episodes"] == 8
            assert row[policy]["low"] <= row[policy]["mean"] <= row[policy]["high"]
    report = (folder / "report.html").read_text()
    assert "<html" in report[:500]
    assert json.loads((folder / "plan.json").read_text())["prediction"]["step_seconds"] > 0
    assert "Predicted and measured" in report
    assert list((folder / "tensorboard").iterdir())

    seen = known(prefect_server)
    for stage in ("get_batch", "suspend", "update", "resume", "recompute", "train_step"):
        assert seen["task_runs"].get(f"{stage}: Completed", 0) >= 2, stage
    for name in ("campaign", "async-train", "evaluate"):
        assert seen["flow_runs"][f"{name}: Completed"] >= 1
    shown = {f"small-{name}" for name in ("progress", "step", "rewards", "evaluation", "plan")}
    assert shown <= set(seen["artifacts"])


def test_one_step_is_a_dag_of_four_stages(
    prefect_server: dict[str, str], model: Path, tmp_path: Path
) -> None:
    campaign = small_campaign(model, tmp_path, train={"steps": 3, "mode": "sync", "alpha": 0})
    file = saved(campaign, tmp_path)
    script = (
        "import asyncio, sys\n"
        "from flows.rl_step import rl_step\n"
        "from tasks.campaign import Campaign\n"
        "if __name__ == '__main__':\n"
        "    row = asyncio.run(rl_step(Campaign.load(sys.argv[1]), 'stepwise'))\n"
        "    print('step', row['step'])\n"
    )
    (tmp_path / "one_step.py").write_text(script)
    environment = {**prefect_server, "PYTHONPATH": str(ROOT)}
    for expected in ("step 0", "step 1"):
        output = run([sys.executable, str(tmp_path / "one_step.py"), str(file)], environment)
        assert output.splitlines()[-1] == expected
    seen = known(prefect_server)
    for stage in ("rollout", "environment", "reward", "train"):
        assert seen["task_runs"].get(f"{stage}: Completed", 0) == 2, stage


def test_a_wrong_campaign_file_is_one_error_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: bad\ndomains: {a: {source: gem}}\ntrain: {group_sise: 4}\n")
    done = subprocess.run(
        [sys.executable, "-m", "flows.campaign", str(tmp_path / "bad.yaml"), f"stores.runs={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "train.group_sise: there is no such option" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


def test_every_deployment_is_deployed_twice_over_and_runs_on_a_worker(
    prefect_server: dict[str, str], model: Path, tmp_path: Path
) -> None:
    prefect = str(Path(sys.executable).with_name("prefect"))
    asyncio.run(make_work_pools(prefect_server["PREFECT_API_URL"], POOLS, QUEUES))
    for _ in range(2):
        run([prefect, "--no-prompt", "deploy", "--all"], prefect_server, stdin=subprocess.DEVNULL)
    seen = known(prefect_server)
    # Other tests have hosts of their own on this server.
    deployed = [name for name in seen["deployments"] if name.removeprefix("pool-host/") not in BOUND_POOLS]
    assert deployed == [
        "async-train/async-train",
        "campaign/laptop",
        "campaign/pools",
        "evaluate/evaluate",
        *(f"pool-host/{pool}" for pool in sorted(POOLS)),
        "rl-step/rl-step",
        "simulate/what-if",
    ]
    assert seen["schedules"]["laptop"] == 1
    campaign = small_campaign(model, tmp_path, train={"steps": 1})
    parameters = json.dumps({"campaign": campaign.model_dump(mode="json"), "run": "deployed"})
    run([prefect, "deployment", "run", "async-train/async-train", "--params", parameters], prefect_server)
    run(
        [prefect, "worker", "start", "--pool", "cpu", "--run-once", "--name", "tester"],
        {**prefect_server, "PREFECT_WORKER_QUERY_SECONDS": "1"},
    )
    assert (tmp_path / "deployed/metrics.jsonl").read_text().count("\n") == 1
    assert known(prefect_server)["flow_runs"].get("async-train: Completed", 0) >= 1
