from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.hardware import hardware
from tasks.simulation.cluster import ClusterConfig, ClusterError
from tests.simulation.small import cluster_data, small_cluster

GPUS = {"hardware": "h100", "devices": 4}
CPUS = {"hardware": "cpu", "devices": 1}


def refusal(**changes: Any) -> str:
    with pytest.raises(ClusterError) as caught:
        ClusterConfig.parse(cluster_data(**changes))
    return str(caught.value)


def test_a_file_is_read_and_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster_data()))
    cluster = ClusterConfig.load(path)
    assert cluster == small_cluster()
    path.write_text(cluster.dump())
    assert ClusterConfig.load(path) == cluster


def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot read"):
        ClusterConfig.load(tmp_path / "missing.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("pools: [")
    with pytest.raises(ClusterError, match="is not YAML"):
        ClusterConfig.load(broken)


def test_rent_is_that_of_all_devices_used_or_not() -> None:
    pools = {
        "gpus": {"hardware": "h100", "devices": 4},
        "cpus": {"hardware": "cpu", "devices": 2, "usd_per_hour": 1.5},
        "calls": {"hardware": "functions", "devices": 100},
    }
    cluster = small_cluster(pools=pools, reward={"kind": "functions", "pool": "calls"})
    assert cluster.usd_per_hour == pytest.approx(4 * hardware("h100").usd_hour + 2 * 1.5)
    assert cluster.h20_per_hour == pytest.approx(4 * 2.85 + 2 * 0.3)


def test_more_devices_than_a_pool_has_is_an_error_with_both_numbers() -> None:
    message = refusal(train={"pool": "gpus", "devices": 3})
    assert "pools.gpus.devices (4) is below the 5" in message


def test_dedicated_reward_workers_take_devices_too() -> None:
    message = refusal(reward={"kind": "dedicated", "workers": 1, "pool": "gpus"})
    assert "pools.gpus.devices (4) is below the 5" in message
    assert "workers" in refusal(reward={"kind": "dedicated", "workers": 1})


def test_a_colocated_trainer_takes_no_devices_of_its_own() -> None:
    rollout = [{"pool": "gpus", "devices": 4}]
    cluster = small_cluster(rollout=rollout, train={"pool": "gpus", "devices": 4, "colocated": True})
    assert cluster.devices_used == {"gpus": 4}
    message = refusal(train={"pool": "gpus", "devices": 4, "colocated": True})
    assert "train.devices (4) is above the 2 devices of rollout" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pools": {"gpus": {"hardware": "h1000", "devices": 4}, "cpus": CPUS}}, "no hardware 'h1000'"),
        ({"rollout": [{"pool": "gpu", "devices": 2}]}, "rollout.0.pool: there is no pool 'gpu'"),
        ({"environment": {"pool": "x"}}, "environment.pool: there is no pool 'x'"),
        (
            {"rollout": [{"pool": "gpus", "devices": 2, "tensor_parallel": 4}]},
            "devices (2) must be a",
        ),
        ({"rollout": [{"pool": "gpus", "devices": 2, "expert_parallel": 2}]}, "expert_parallel (2)"),
        (
            {"rollout": [{"pool": "gpus", "devices": 2, "role": "decode"}]},
            "has engines of role decode",
        ),
        (
            {"rollout": [{"pool": "gpus", "devices": 2, "max_batch_tokens": 64}]},
            "max_batch_tokens (64) is below max_running (256)",
        ),
        ({"affinity": {"math": "cpus"}}, "affinity.math: pool 'cpus' has no engines"),
        ({"train": {"pool": "gpus", "devices": 2, "tensor": 2}}, "train.tensor: there is no such option"),
        ({"model": 7}, "model: "),
    ],
)
def test_what_cannot_be_is_said_with_its_option(changes: dict[str, Any], words: str) -> None:
    assert words in refusal(**changes)


def test_functions_neither_generate_nor_train() -> None:
    pools = {"gpus": {"hardware": "functions", "devices": 4}, "cpus": CPUS}
    assert "gpus are functions" in refusal(pools=pools)


def test_one_error_has_a_line_for_each_option() -> None:
    message = refusal(train={"pool": "gpus", "devices": 0}, weights={"transport": "pigeon"})
    assert "train.devices" in message
    assert "weights.transport" in message


def test_engines_are_as_many_as_the_devices_make() -> None:
    rollout = [{"pool": "gpus", "devices": 4, "tensor_parallel": 2}]
    (spec,) = small_cluster(pools={"gpus": {**GPUS, "devices": 8}, "cpus": CPUS}, rollout=rollout).rollout
    assert spec.engines == 2
    assert spec.parallel.devices == 2
