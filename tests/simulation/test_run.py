import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.held_files import HeldFiles
from infra.model_size import ModelSize
from infra.models import MODELS
from infra.performance.iteration import BatchWork
from infra.performance.transfer import transport
from infra.virtual_time import StandStill, run_virtual
from tasks.campaign import Campaign
from tasks.report.html import write_report
from tasks.report.run_files import RunFiles
from tasks.simulation import run
from tasks.simulation.cluster import ClusterConfig, ClusterError
from tasks.simulation.fitting import fit
from tasks.simulation.result import SimulationResult
from tasks.simulation.run import simulate
from tasks.train.modes import MODES, ModeName
from tests.simulation.small import campaign_data, cluster_data, small_campaign, small_cluster

GPUS = {"hardware": "h100", "devices": 4}
CPUS = {"hardware": "cpu", "devices": 1}
TAILED = {
    "math": {
        "prompt_tokens": 50,
        "turns": {"uniform": {"low": 1, "high": 3}},
        "response_tokens": {"lognormal": {"median": 60, "sigma": 0.5}},
        "observation_tokens": 20,
        "step_s": {"constant": 0.1, "tail": {"probability": 0.1, "of": {"constant": 9.0}}},
    }
}


def in_mode(mode: ModeName, **train: Any) -> SimulationResult:
    alpha = MODES[mode].lowest_alpha
    return simulate(small_campaign(mode=mode, alpha=alpha, **train), small_cluster(workload=TAILED))


@pytest.fixture(scope="module")
def of_modes() -> dict[ModeName, SimulationResult]:
    return {mode: in_mode(mode, steps=5) for mode in MODES}


def test_every_mode_trains_its_steps(of_modes: dict[ModeName, SimulationResult]) -> None:
    for result in of_modes.values():
        assert [row["step"] for row in result.rows] == list(range(5))
        assert all(row["trajectories"] == 16 for row in result.rows)
        assert all(0 < share <= 1 for share in result.utilisation.values())


def test_modes_that_wait_less_take_less(of_modes: dict[ModeName, SimulationResult]) -> None:
    """One trajectory in a few has a step of 9 s: lockstep waits for each such step, modes that go on over
    updates for none."""
    seconds = {mode: result.virtual_seconds for mode, result in of_modes.items()}
    assert seconds["sync"] > seconds["sync_plus"] > seconds["one_off"] > seconds["tutti"]
    assert seconds["areal"] <= seconds["tutti"]


@pytest.mark.parametrize("alpha", [1, 2, 4])
def test_no_trajectory_of_a_batch_is_older_than_alpha(alpha: int) -> None:
    result = simulate(
        small_campaign(steps=8, mode="tutti", alpha=alpha), small_cluster(workload=TAILED), warm_up_steps=0
    )
    assert len(result.staleness) == alpha + 1
    assert sum(result.staleness) == 8 * 16
    tokens = [row["staleness/tokens"] for row in result.rows]
    assert max(len(ages) for ages in tokens) <= alpha + 1
    assert max(len(ages) for ages in tokens) > 1


def test_modes_without_overlap_train_no_older_weights(of_modes: dict[ModeName, SimulationResult]) -> None:
    assert of_modes["sync"].staleness == [64]
    assert of_modes["sync_plus"].staleness == [64]
    assert of_modes["one_off"].staleness == [0, 64]


def test_what_is_too_old_is_aborted_and_only_areal_trains_it() -> None:
    """One step in 20 outlasts several train steps, and spare groups take the places of what is late."""
    rarely = {"constant": 0.1, "tail": {"probability": 0.05, "of": {"constant": 60.0}}}
    data = campaign_data(steps=12, redundancy={"groups": 3})
    data["domains"]["math"]["step_limit_s"] = 100.0
    late = small_cluster(workload={"math": {**TAILED["math"], "step_s": rarely}})
    bounded = simulate(Campaign.parse(data), late)
    data["train"]["mode"] = "areal"
    unbounded = simulate(Campaign.parse(data), late)
    assert len(bounded.staleness) == 2
    assert sum(row.get("tokens/wasted/stale", 0) for row in bounded.rows) > 0
    assert len(unbounded.staleness) > 2
    assert sum(row.get("tokens/wasted/stale", 0) for row in unbounded.rows) == 0


def test_redundant_members_are_cancelled_and_spare_the_tail() -> None:
    plain = in_mode("sync_plus", steps=6)
    outrun = in_mode("sync_plus", steps=6, redundancy={"groups": 2, "members": 2})
    assert plain.wasted_share == 0.0
    assert outrun.wasted_share > 0.05
    assert sum(row["outcomes/cancelled"] for row in outrun.rows if "outcomes/cancelled" in row) > 0
    assert outrun.step_seconds < plain.step_seconds


def test_turns_run_over_updates_and_their_kv_is_computed_again() -> None:
    """Turns of seconds, and an update every second or two."""
    data = campaign_data(steps=6, alpha=2, trainer={"micro_batch_tokens": 7000})
    data["domains"]["math"] |= {"max_turn_tokens": 2000, "max_tokens": 7000}
    lengths = {"uniform": {"low": 200, "high": 2000}}
    long = {"math": {**TAILED["math"], "response_tokens": lengths, "step_s": 0.0}}
    campaign = Campaign.parse({**data, "model": {"path": "anywhere"}})
    result = simulate(campaign, small_cluster(workload=long))
    assert sum(row["tokens/recomputed"] for row in result.rows) > 0
    assert any(row["staleness/mixed_share"] > 0 for row in result.rows)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_simulation_in_any_process(tmp_path: Path) -> None:
    """Whatever the hashes of names are, by which sets are ordered: they differ between processes."""
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps(cluster_data(workload=TAILED)))
    campaigns = [tmp_path / "tutti.json", tmp_path / "sync.json"]
    redundancy = {"groups": 1, "members": 1}
    campaigns[0].write_text(json.dumps(campaign_data(mode="tutti", redundancy=redundancy)))
    campaigns[1].write_text(json.dumps(campaign_data(mode="sync", alpha=0)))
    script = (
        "import json, sys\n"
        "from tasks.campaign import Campaign\n"
        "from tasks.simulation.cluster import ClusterConfig\n"
        "from tasks.simulation.run import simulate\n"
        "cluster = ClusterConfig.load(sys.argv[1])\n"
        "results = [simulate(Campaign.load(path), cluster) for path in sys.argv[2:]]\n"
        "print(json.dumps([[each.rows, each.events, each.virtual_seconds] for each in results]))\n"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", script, cluster, *campaigns],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    here = [simulate(Campaign.load(campaign), ClusterConfig.load(cluster)) for campaign in campaigns]
    said = [[each.rows, each.events, each.virtual_seconds] for each in here]
    assert json.loads(elsewhere.stdout) == json.loads(json.dumps(said))


def test_another_seed_gives_another_simulation() -> None:
    first, second = (
        simulate(Campaign.parse({**campaign_data(), "seed": seed}), small_cluster()) for seed in (1, 2)
    )
    assert first.rows != second.rows


def test_a_runs_files_are_left_in_a_folder(tmp_path: Path) -> None:
    result = simulate(small_campaign(), small_cluster(), folder=tmp_path)
    files = RunFiles(tmp_path)
    assert files.read_metrics() == json.loads(json.dumps(result.rows))
    stages = {(span.lane, span.stage) for span in files.read_spans()}
    assert {("control", "get_batch"), ("trainer", "train_step"), ("engine", "generate")} <= stages
    fates = [end["fate"] for end in files.read_ends()]
    assert fates.count("trained") == 3 * 16
    assert ModelSize.of(json.loads((tmp_path / "model/config.json").read_text())) == ModelSize.of(
        MODELS["qwen3-1.7b"]
    )
    assert Campaign.load(tmp_path / "campaign.yaml").train.steps == 3
    assert "Staleness" in write_report(tmp_path).read_text()


def test_a_model_is_named_as_its_maker_does_or_by_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-1.7b"]))
    by_name, by_directory, plain = (
        simulate(small_campaign(), small_cluster(model=model)).rows
        for model in ("Qwen/Qwen3-1.7B", str(tmp_path), "qwen3-1.7b")
    )
    assert by_name == by_directory == plain


def test_nothing_of_a_simulation_stays_in_the_process() -> None:
    before = set(HeldFiles._held)
    simulate(small_campaign(), small_cluster())
    assert set(HeldFiles._held) == before


def test_prefill_and_decode_engines_share_out_turns() -> None:
    pools = {"p": {"hardware": "h100", "devices": 4}, "d": {"hardware": "h20", "devices": 2}, "cpus": CPUS}
    workload = {"math": {**TAILED["math"], "prompt_tokens": 300}}
    result = simulate(
        small_campaign(),
        small_cluster(
            pools=pools,
            workload=workload,
            rollout=[
                {"pool": "p", "devices": 2, "role": "prefill"},
                {"pool": "d", "devices": 2, "role": "decode"},
            ],
            train={"pool": "p", "devices": 2},
        ),
    )
    assert set(result.utilisation) == {"p", "d"}
    assert all(share > 0 for share in result.utilisation.values())


def test_domains_keep_to_their_pools() -> None:
    """All trajectories prefer one pool of two, so that the other's engines do nothing."""
    pools = {"gpus": GPUS, "idle": {"hardware": "h20", "devices": 2}, "cpus": CPUS}
    rollout = [{"pool": "gpus", "devices": 2}, {"pool": "idle", "devices": 2}]
    cluster = small_cluster(pools=pools, rollout=rollout, affinity={"math": "gpus"})
    result = simulate(small_campaign(), cluster)
    assert result.utilisation["idle"] == 0.0
    assert result.utilisation["gpus"] > 0.0


def test_a_colocated_trainer_shares_its_pools_time() -> None:
    pools = {"gpus": {"hardware": "h100", "devices": 2}, "cpus": CPUS}
    train = {"pool": "gpus", "devices": 2, "colocated": True}
    campaign = small_campaign(mode="sync_plus", alpha=0)
    shared = simulate(campaign, small_cluster(pools=pools, train=train))
    apart = simulate(campaign, small_cluster())
    moved = 2 * ModelSize.of(MODELS["qwen3-1.7b"]).state_bytes / (2 * 25e9)
    assert shared.step_seconds - apart.step_seconds == pytest.approx(moved)
    assert shared.usd_per_step < apart.usd_per_step


def test_a_store_takes_pushes_and_pulls_off_the_update() -> None:
    """In mode tutti they run beside rollout; what is left of an update is to put weights into devices."""
    size = ModelSize.of(MODELS["qwen3-1.7b"])
    campaign = small_campaign(steps=4)
    direct = simulate(campaign, small_cluster())
    stored = simulate(campaign, small_cluster(weights={"transport": "store"}))
    assert stored.stage_seconds["update"] == pytest.approx(size.weight_bytes / 25e9)
    assert direct.stage_seconds["publish"] == 0.0
    assert direct.stage_seconds["pull"] == 0.0
    assert direct.stage_seconds["update"] > stored.stage_seconds["update"]
    assert stored.stage_seconds["publish"] > 0.0


def test_a_step_is_the_sum_of_its_parts_where_nothing_overlaps() -> None:
    """One trajectory of one turn, alone: its reset, prefill, decoding, environment step and reward, then the
    train step and the weights' way to the engine."""
    data = campaign_data(mode="sync_plus", alpha=0, groups=1, group_size=1)
    prompt, response = 120, 80
    work = {"turns": 1, "reset_s": 3.0, "step_s": 2.0, "reward_s": 1.0}
    cluster = small_cluster(workload={"math": {"prompt_tokens": prompt, "response_tokens": response, **work}})
    result = simulate(Campaign.parse(data), cluster)
    fitted = fit(Campaign.parse(data), cluster)
    timing = fitted.engines[0].timing
    prefill = timing.seconds(BatchWork(0, 0, prompt, prompt * prompt / 2, 1))
    decode = timing.decode_seconds(1, prompt + 1, response - 1)
    rollout = 3.0 + prefill + decode + 2.0 + 1.0
    train = fitted.training.step_seconds([prompt + response])
    pull = transport("nccl").pull_seconds(fitted.size.weight_bytes, len(fitted.engines))
    assert result.stage_seconds["get_batch"] == pytest.approx(rollout)
    assert result.stage_seconds["train_step"] == pytest.approx(train)
    assert result.stage_seconds["update"] == pytest.approx(pull)
    assert result.step_seconds == pytest.approx(rollout + train + pull)
    assert result.tokens_per_s == pytest.approx((prompt + response) / result.step_seconds)


def test_a_pool_works_while_its_services_do() -> None:
    pools = {
        "gpus": {"hardware": "h100", "devices": 2},
        "t": {"hardware": "h100", "devices": 4},
        "cpus": CPUS,
    }
    cluster = small_cluster(pools=pools, train={"pool": "t", "devices": 2})
    result = simulate(small_campaign(), cluster)
    half = result.stage_seconds["train_step"] / result.step_seconds / 2
    assert result.utilisation["t"] == pytest.approx(half)  # of its four devices, two train


def test_cost_is_rent_over_the_steps_time() -> None:
    cluster = small_cluster()
    result = simulate(small_campaign(), cluster)
    assert result.usd_per_step == pytest.approx(cluster.usd_per_hour * result.step_seconds / 3600)
    assert result.h20_hours_per_step == pytest.approx(cluster.h20_per_hour * result.step_seconds / 3600)


def test_functions_bill_what_they_work() -> None:
    pools = {
        "gpus": GPUS,
        "cpus": CPUS,
        "calls": {"hardware": "functions", "devices": 1, "usd_per_hour": 3600},
    }
    workload = {"math": {**TAILED["math"], "reward_s": 2.0}}
    reward = {"kind": "functions", "pool": "calls"}
    cluster = small_cluster(pools=pools, workload=workload, reward=reward)
    result = simulate(small_campaign(mode="sync_plus", alpha=0), cluster)
    rent = cluster.usd_per_hour * result.step_seconds / 3600
    assert result.usd_per_step - rent == pytest.approx(16 * 2.0)


def test_places_bound_the_trajectories_at_a_time() -> None:
    slow = {"math": {**TAILED["math"], "turns": 1, "step_s": 10.0}}
    campaign = small_campaign(mode="sync_plus", alpha=0)
    free = simulate(campaign, small_cluster(workload=slow))
    crowded = simulate(campaign, small_cluster(workload=slow, environment={"pool": "cpus", "places": 4}))
    assert crowded.step_seconds > 3.5 * free.step_seconds
    assert 0.5 < crowded.utilisation["cpus"] <= 1


def test_steps_to_leave_out_must_leave_some() -> None:
    with pytest.raises(ClusterError, match=r"train\.steps \(3\) must be above the 3 steps of warm-up"):
        simulate(small_campaign(), small_cluster(), warm_up_steps=2, cool_down_steps=1)


def test_the_last_steps_begin_nothing_and_may_be_left_out() -> None:
    """Engines that are busy in every step but the last, for which alpha of 1 had them work before."""
    campaign = small_campaign(steps=5)
    whole = simulate(campaign, small_cluster(workload=TAILED))
    steady = simulate(campaign, small_cluster(workload=TAILED), cool_down_steps=1)
    assert steady.rows == whole.rows
    assert [row["step"] for row in steady.steps] == [1, 2, 3]
    assert steady.step_seconds == pytest.approx(sum(row["seconds/step"] for row in steady.steps) / 3)
    assert steady.utilisation["gpus"] != whole.utilisation["gpus"]


def test_a_run_that_waits_for_nothing_stands_still(tmp_path: Path) -> None:
    """An environment that takes for ever, as its campaign allows it to."""
    data = campaign_data()
    data["domains"]["math"]["step_limit_s"] = 1e12
    never = {"math": {**TAILED["math"], "step_s": 1e11}}
    with pytest.raises(StandStill):
        simulate(Campaign.parse(data), small_cluster(workload=never))


def test_what_a_simulation_raises_comes_through() -> None:
    failing = {"math": {**TAILED["math"], "reset_failure": 1.0}}
    campaign = Campaign.parse({**campaign_data(), "environment": {"failure_budget": 10}})
    with pytest.raises(RuntimeError, match="failure_budget"):
        simulate(campaign, small_cluster(workload=failing))


def test_virtual_time_is_the_runs_and_not_the_machines(tmp_path: Path) -> None:
    fitted = fit(small_campaign(), small_cluster())
    rows, usages, seconds, _ = run_virtual(run._run(fitted, tmp_path))
    assert usages[0].at == 0.0
    assert [usage.at for usage in usages[1:]] == [row["time"] for row in rows]
    assert seconds >= usages[-1].at
