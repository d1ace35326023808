"""A campaign and a cluster so small that a simulation of them takes a fraction of a second."""

from typing import Any

from tasks.campaign import Campaign
from tasks.simulation.cluster import ClusterConfig


def campaign_data(**train: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "seed": 3,
        "domains": {
            "math": {"source": "simulated", "max_turns": 3, "max_turn_tokens": 200, "max_tokens": 500}
        },
        "train": {
            "steps": 3,
            "groups": 4,
            "group_size": 4,
            "algorithm": {"kind": "grpo", "zero_variance": "keep"},
            **train,
        },
    }


def cluster_data(**changes: Any) -> dict[str, Any]:
    return {
        "name": "few",
        "model": "qwen3-1.7b",
        "pools": {
            "gpus": {"hardware": "h100", "devices": 4},
            "cpus": {"hardware": "cpu", "devices": 1},
        },
        "rollout": [{"pool": "gpus", "devices": 2}],
        "train": {"pool": "gpus", "devices": 2},
        "environment": {"pool": "cpus"},
        "weights": {"transport": "nccl"},
        "workload": {
            "math": {
                "prompt_tokens": 50,
                "turns": {"uniform": {"low": 1, "high": 3}},
                "response_tokens": {"lognormal": {"median": 60, "sigma": 0.5}},
                "observation_tokens": 20,
                "step_s": 0.1,
            }
        },
        **changes,
    }


def small_campaign(**train: Any) -> Campaign:
    return Campaign.parse(campaign_data(**train))


def small_cluster(**changes: Any) -> ClusterConfig:
    return ClusterConfig.parse(cluster_data(**changes))
