"""Campaigns on work pools: a real cluster, deployed flows, and what is left when one ends badly."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from infra.cluster.state import MARK
from tasks.campaign import Campaign
from tests.e2e.campaigns import saved, small_campaign
from tests.flows.prefect_runs import PrefectApi

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
POOLS = {
    "rollout": ["bandwidth-gpu", "compute-gpu"],
    "train": "train-gpu",
    "environment": "cpu",
    "reward": "cpu",
}


@pytest.fixture(scope="session")
def api(cluster: dict[str, str]) -> PrefectApi:
    return PrefectApi(cluster["PREFECT_API_URL"])


def campaign_on_pools(model: Path, runs: Path, **changes: Any) -> Campaign:
    return small_campaign(
        model,
        runs,
        **{"pools": POOLS, "rollout": {"engine": {"kind": "torch", "workers": 2}}, **changes},
    )


def parameters(campaign: Campaign, run: str) -> dict[str, Any]:
    return {"campaign": campaign.model_dump(mode="json"), "run": run}


def processes(cluster: dict[str, str], *words: str) -> list[psutil.Process]:
    """The cluster's processes whose command line, or Prefect flow run, has one of these words."""
    found = []
    for process in psutil.process_iter():
        try:
            environment, line = process.environ(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        text = f"{line} {environment.get('PREFECT__FLOW_RUN_ID', '')}"
        if environment.get(MARK) == cluster[MARK] and any(word in text for word in words):
            found.append(process)
    return found


def services(cluster: dict[str, str]) -> list[psutil.Process]:
    return processes(cluster, "tasks.rollout", "tasks.train", "tasks.environment", "tasks.reward")


def until(true: Callable[[], Any], what: str, limit_s: float = 600) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.2)


def steps_done(runs: Path, run: str) -> int:
    metrics = runs / run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def test_each_stage_of_a_deployed_campaign_is_a_task_run_on_its_pools_host(
    cluster: dict[str, str], api: PrefectApi, model: Path, tmp_path: Path
) -> None:
    campaign = campaign_on_pools(
        model,
        tmp_path,
        train={"steps": 2},
        environment={"scheduler": cluster["TUTTI_DASK_SCHEDULER"]},
        stores={"runs": str(tmp_path), "samples": "s3://tutti/samples"},
    )
    flow_run = api.start("campaign/pools", parameters(campaign, "pooled"))
    ended = api.end_of(flow_run, 600)
    assert ended["state_type"] == "COMPLETED", ended["state"]
    assert steps_done(tmp_path, "pooled") == 2
    assert (tmp_path / "pooled" / "report.html").exists()

    stages = api.stages_by_pool("pooled")
    assert set(stages) == {"bandwidth-gpu", "compute-gpu", "train-gpu", "cpu"}
    on_all = [
        {f"{name} {step}" for step in range(2)} for name in ("rollout", "train", "environment", "reward")
    ]
    rollout, train, environment, reward = on_all
    refresh = {f"{name} {step}" for name in ("suspend", "resume", "recompute") for step in range(2)}
    assert rollout | refresh | {"update 1", "update 2"} <= set(stages["bandwidth-gpu"])
    assert set(stages["compute-gpu"]) == rollout
    assert train <= set(stages["train-gpu"])
    assert set(stages["train-gpu"]) <= train | {
        f"{name} {step}" for name in ("publish", "checkpoint") for step in (0, 1)
    }
    assert set(stages["cpu"]) == environment | reward
    assert {state for names in stages.values() for state in names.values()} == {"COMPLETED"}

    for host in api.hosts_of("pooled"):
        assert host["state_type"] == "COMPLETED"
        assert host["work_queue_name"] == "campaigns"
        above = api.get(f"task_runs/{host['parent_task_run_id']}")
        assert above["flow_run_id"] == flow_run
    assert api.tickets() == []
    until(lambda: not services(cluster), "every service has ended, those in the shared Dask workers too", 30)


def test_one_step_runs_its_four_stages_on_the_pools(
    cluster: dict[str, str], api: PrefectApi, model: Path, tmp_path: Path
) -> None:
    campaign = campaign_on_pools(model, tmp_path, train={"steps": 2, "mode": "sync", "alpha": 0})
    ended = api.end_of(api.start("rl-step/rl-step", parameters(campaign, "stepwise")), 600)
    assert ended["state_type"] == "COMPLETED", ended["state"]
    stages = api.stages_by_pool("stepwise")
    assert "rollout 0" in stages["bandwidth-gpu"]
    assert "rollout 0" in stages["compute-gpu"]
    assert {"environment 0", "reward 0"} <= set(stages["cpu"])
    assert "train 0" in stages["train-gpu"]


@contextmanager
def begun(cluster: dict[str, str], api: PrefectApi, model: Path, runs: Path, run: str) -> Iterator[str]:
    """A campaign that will not end by itself, under way on all its pools; gone afterwards in any case."""
    campaign = campaign_on_pools(model, runs, train={"steps": 100_000})
    flow_run = api.start("campaign/pools", parameters(campaign, run))

    def under_way() -> bool:
        assert api.flow_run(flow_run)["state_type"] not in ("FAILED", "CRASHED")
        return steps_done(runs, run) > 0

    try:
        until(under_way, f"{run} has made a step")
        assert len(services(cluster)) >= 4
        yield flow_run
    finally:
        for process in processes(cluster, flow_run):
            process.kill()


def test_kill_minus_9_of_the_campaign_ends_every_host_and_service(
    cluster: dict[str, str], api: PrefectApi, model: Path, tmp_path: Path
) -> None:
    with begun(cluster, api, model, tmp_path, "killed") as flow_run:
        hosts = api.hosts_of("killed")
        for process in processes(cluster, flow_run):
            process.kill()
        until(lambda: not services(cluster), "every service has ended", 60)
        for host in hosts:
            ended = api.end_of(host["id"], 60)
            assert ended["state_type"] == "FAILED"
            assert "is gone" in ended["state"]["message"]
        assert api.tickets() == []


def test_a_killed_host_fails_the_campaign_with_one_clear_error(
    cluster: dict[str, str], api: PrefectApi, model: Path, tmp_path: Path
) -> None:
    with begun(cluster, api, model, tmp_path, "hostless") as flow_run:
        (host,) = [host for host in api.hosts_of("hostless") if host["work_pool_name"] == "train-gpu"]
        for process in processes(cluster, host["id"]):
            if "tasks." not in " ".join(process.cmdline()):
                process.kill()
        ended = api.end_of(flow_run, 300)
        assert ended["state_type"] == "FAILED"
        # Whichever is noticed first: the host's own connection, or the trainer's through it.
        assert re.search("HostLost|PartLost: the trainer is lost", ended["state"]["message"])
        assert "'train-gpu'" in ended["state"]["message"]
        until(lambda: not services(cluster), "every service has ended", 60)


def test_cancelling_the_campaign_in_prefect_ends_every_process(
    cluster: dict[str, str], api: PrefectApi, model: Path, tmp_path: Path
) -> None:
    with begun(cluster, api, model, tmp_path, "cancelled") as flow_run:
        hosts = api.hosts_of("cancelled")
        api.post(f"flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING"}})
        until(lambda: not services(cluster), "every service has ended", 120)
        for host in hosts:
            api.end_of(host["id"], 60)
        until(lambda: not processes(cluster, flow_run), "the campaign has ended", 60)
        assert api.end_of(flow_run, 60)["state_type"] == "CANCELLED"


def test_a_pool_that_cannot_serve_is_one_error_before_anything_starts(
    cluster: dict[str, str], model: Path, tmp_path: Path
) -> None:
    campaign = campaign_on_pools(model, tmp_path / "runs", pools={**POOLS, "train": "h800"})
    done = subprocess.run(
        [sys.executable, "-m", "flows.campaign", str(saved(campaign, tmp_path)), "--run", "never"],
        env={**os.environ, **cluster},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "pools.train: Prefect has no work pool 'h800'" in done.stderr
    assert "make up" in done.stderr
    assert not (tmp_path / "runs" / "never" / "logs" / "trainer.log").exists()


def test_dispatching_a_stage_to_a_pool_costs_at_most_300_ms(cluster: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.pool_dispatch", "--stages", "30", "--repeats", "2"],
        env={**os.environ, **cluster},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["median_ms"] <= 300


def test_every_deployed_campaign_has_the_campaign_file_as_its_parameter(
    cluster: dict[str, str], api: PrefectApi
) -> None:
    laptop = api.get("deployments/name/campaign/laptop")["parameters"]["campaign"]
    written = yaml.safe_load((ROOT / "flows/campaigns/laptop.yaml").read_text())
    assert Campaign.parse(laptop) == Campaign.parse(written)
    pools = Campaign.parse(api.get("deployments/name/campaign/pools")["parameters"]["campaign"])
    assert pools.environment.scheduler == cluster["TUTTI_DASK_SCHEDULER"]
    assert pools.pools is not None
    assert set(pools.pools.names) == {"bandwidth-gpu", "compute-gpu", "train-gpu", "cpu"}
