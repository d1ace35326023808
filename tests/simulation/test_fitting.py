from typing import Any

import pytest

from infra.performance.calibrated import Calibration, Fitted
from tasks.campaign import Campaign
from tasks.rollout.fleet_plan import place_engines
from tasks.simulation.cluster import ClusterError
from tasks.simulation.fitting import fit
from tests.simulation.small import campaign_data, small_campaign, small_cluster

CPUS = {"hardware": "cpu", "devices": 1}


def refusal(mode: str = "tutti", **cluster: Any) -> str:
    alpha = 0 if mode.startswith("sync") else 1
    with pytest.raises(ClusterError) as caught:
        fit(small_campaign(mode=mode, alpha=alpha), small_cluster(**cluster))
    return str(caught.value)


def test_a_model_too_large_for_an_engine_is_an_error_with_the_numbers() -> None:
    message = refusal(model="llama-3.1-70b")
    assert "rollout.0: the model does not fit" in message
    assert "train: training does not fit" in message
    assert "GB" in message


def test_kv_for_less_than_one_trajectory_is_an_error_with_the_numbers() -> None:
    data = campaign_data(trainer={"micro_batch_tokens": 2_000_000})
    data["domains"]["math"]["max_tokens"] = 2_000_000
    campaign = Campaign.parse({**data, "model": {"path": "anywhere"}})
    with pytest.raises(ClusterError, match=r"holds the KV of \d+ tokens, and a trajectory may have 2000000"):
        fit(campaign, small_cluster())


def test_a_workload_without_a_domain_of_the_campaign_is_an_error() -> None:
    message = refusal(workload={"game": {"prompt_tokens": 1, "response_tokens": 1}})
    assert "workload: it has no domain math, which the campaign trains on; it has game" in message


def test_a_mode_without_its_devices_is_an_error() -> None:
    colocated = {"pool": "gpus", "devices": 2, "colocated": True}
    message = refusal("one_off", train=colocated)
    assert "mode one_off trains while engines generate" in message
    assert "2 devices" in message
    assert fit(small_campaign(mode="sync_plus", alpha=0), small_cluster(train=colocated))


def test_places_below_a_lockstep_batch_are_an_error() -> None:
    message = refusal("sync", environment={"pool": "cpus", "places": 15})
    assert "environment.places (15) is below the 16" in message


def test_an_unknown_model_or_calibration_is_an_error() -> None:
    assert "model: " in refusal(model="nobodys-7b")
    assert "coefficients: there is no calibration 'nothing'" in refusal(coefficients="nothing")


def test_every_problem_is_told_at_once() -> None:
    message = refusal(
        model="qwen3-32b", workload={"game": {"prompt_tokens": 1, "response_tokens": 1}}, coefficients="x"
    )
    assert "workload: " in message
    assert "coefficients: " in message


def test_engines_have_the_places_that_the_fleet_gives_them() -> None:
    """The fleet numbers prefill workers first and spreads engines over the pools that the launcher lists."""
    pools = {
        "a": {"hardware": "h100", "devices": 4},
        "b": {"hardware": "h20", "devices": 3},
        "gpus": {"hardware": "h100", "devices": 2},
        "cpus": CPUS,
    }
    rollout = [
        {"pool": "b", "devices": 3, "role": "decode"},
        {"pool": "a", "devices": 2, "role": "decode", "tensor_parallel": 2},
        {"pool": "a", "devices": 2, "role": "prefill"},
    ]
    fitted = fit(small_campaign(), small_cluster(pools=pools, rollout=rollout))
    places = place_engines(
        fitted.campaign.rollout.worker_roles, fitted.pools(prefill=False), fitted.pools(prefill=True)
    )
    assert list(places.values()) == [(plan.spec.pool, plan.spec.role) for plan in fitted.engines]
    assert [plan.timing.parallel.devices for plan in fitted.engines] == [1, 1, 1, 1, 1, 2]


def test_affinity_is_the_clusters_before_the_campaigns() -> None:
    pools = {
        "gpus": {"hardware": "h100", "devices": 4},
        "more": {"hardware": "h20", "devices": 2},
        "cpus": CPUS,
    }
    rollout = [{"pool": "gpus", "devices": 2}, {"pool": "more", "devices": 2}]
    campaign = small_campaign()
    affinity = campaign.affinity.model_copy(update={"domains": {"math": "elsewhere"}})
    asking = campaign.model_copy(update={"affinity": affinity})
    with pytest.raises(ClusterError, match="math prefers pool elsewhere"):
        fit(asking, small_cluster(pools=pools, rollout=rollout))
    fitted = fit(asking, small_cluster(pools=pools, rollout=rollout, affinity={"math": "more"}))
    assert fitted.campaign.affinity.domains == {"math": "more"}
    assert fit(asking, small_cluster(affinity={})).campaign.affinity.domains == {}


def test_coefficients_of_a_calibration_are_taken(tmp_path: Any) -> None:
    calibration = Calibration(
        name="mine", fitted_on="nothing", hardware={"h100": Fitted(training={"step_s": 100.0})}
    )
    calibration.save(tmp_path / "mine.json")
    usual = fit(small_campaign(), small_cluster()).training
    fitted = fit(small_campaign(), small_cluster(coefficients=str(tmp_path / "mine.json"))).training
    slower = 100.0 - usual.coefficients.step_s
    assert fitted.step_seconds([100]) - usual.step_seconds([100]) == pytest.approx(slower)


def test_the_campaigns_micro_batches_are_taken() -> None:
    fitted = fit(small_campaign(trainer={"micro_batch_tokens": 777}), small_cluster())
    assert fitted.training.coefficients.micro_batch_tokens == 777


def test_tensor_parallelism_over_several_nodes_is_slower() -> None:
    """Its all-reduces then go over the network."""
    rollout = [{"pool": "gpus", "devices": 2, "tensor_parallel": 2}]

    def seconds(devices_per_node: int) -> float:
        gpus = {"hardware": "h100", "devices": 4, "devices_per_node": devices_per_node}
        fitted = fit(small_campaign(), small_cluster(pools={"gpus": gpus, "cpus": CPUS}, rollout=rollout))
        return fitted.engines[0].timing.decode_seconds(8, 800, 1)

    assert seconds(1) > 1.05 * seconds(8)
