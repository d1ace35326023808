"""RollArt's clusters (§7.1) as cluster files. Every number says where it is from."""

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.simulation.cluster import ClusterConfig
from tasks.simulation.rollart.claims import Given
from tasks.simulation.rollart.workloads import DOMAINS, affinity_of

MODELS = {"8B": "qwen3-8b", "14B": "qwen3-14b", "32B": "qwen3-32b"}
ROLLOUT_TP = {"8B": 1, "14B": 2, "32B": 4}
"""§7.1: rollout TP 1/2/4."""
TRAIN_SHARE = 4
"""One of so many GPUs trains: 32 of 128 (§7.1)."""

RDMA = {"transport": "rdma"}
"""Inside a cluster, NCCL over 400 Gb/s InfiniBand: trainer and engines wait for it (Table 3)."""
MOONCAKE = {"transport": "mooncake"}
"""Across clusters, over Ethernet: pushed beside rollout, pulled beside generation (Table 4)."""

FUNCTIONS = {
    "kind": "functions",
    "cold_start_s": {"lognormal": {"median": 1.0, "sigma": 0.5}},
    "keep_alive_s": 600,
}
DEDICATED = {"kind": "dedicated", "workers": 4}
"""§3.3: 4 H800 hold the reward model."""

HARDWARE = (
    Given("H20 148 TFLOPS, 96 GB, 4.0 TB/s; H800 989.5, 80, 3.35", "published", "Table 2"),
    Given("cost of an H800 2.85 of an H20's", "published", "Table 2"),
)
BREAKDOWN = "rollart-breakdown"
"""The calibration whose trainer takes 84.5 s for the step of §3.3."""
TRAINER = Given(
    "a train step takes what its compute takes",
    "inferred",
    "infra/performance/training.py at its defaults, about half of the peak. The 84.5 s of §3.3 are four "
    "times that, on GPUs that also generate; how they divide is unpublished, so they are not carried over. "
    "Chosen knowing that carried over, at 64 s a step more, One-off over Sync+ at 8B is 1.65",
)
MAIN_CLUSTER = (
    *HARDWARE,
    TRAINER,
    Given("rollout TP 1, 2, 4 for 8B, 14B, 32B; context 32k", "published", "§7.1"),
    Given("32 H800 train; 64 H800 and 32 H20 generate; baselines on 128 H800", "published", "§7.1"),
    Given("baselines: 32 H800 train and 96 generate in every mode", "inferred", "as the asynchronous ones"),
    Given(
        "weights: RDMA 4.14 s + GB / 11.5; Mooncake pushes 0.471 GB/s, pulls 2.46",
        "fitted",
        "Tables 3 and 4, infra/performance/transfer.py",
    ),
    Given("function: cold start 1 s, kept for 600 s", "inferred", "undisclosed in the paper"),
    Given("engine: vLLM's scheduler, 256 sequences, 8,192 tokens a step", "inferred", "vLLM's defaults"),
)


def engines(pool: str, devices: int, tensor_parallel: int, **more: Any) -> dict[str, Any]:
    """An entry of a cluster file's `rollout`."""
    return {"pool": pool, "devices": devices, "tensor_parallel": tensor_parallel, **more}


def cluster_of(
    model: str,
    *,
    train: tuple[str, int],
    rollout: Sequence[Mapping[str, Any]],
    domains: Sequence[str] = tuple(DOMAINS),
    hardware: Mapping[str, str] | None = None,
    colocated: bool = False,
    reward: Mapping[str, Any] = FUNCTIONS,
    weights: Mapping[str, Any] = RDMA,
    **more: Any,
) -> ClusterConfig:
    """A cluster whose pools hold exactly what is used of them.

    `model` is `8B`, `14B`, `32B` or a name of the catalogue; `train` is (pool, devices); `rollout` are
    entries of `engines`; `hardware` names that of pools which are not called as it. `colocated` trains on
    devices that also generate. `more` are further keys of the cluster file.
    """
    used: dict[str, int] = {} if colocated else {train[0]: train[1]}
    for entry in rollout:
        used[entry["pool"]] = used.get(entry["pool"], 0) + entry["devices"]
    if colocated:
        used[train[0]] = max(used.get(train[0], 0), train[1])
    if reward["kind"] == "dedicated":
        reward = {"pool": train[0], **reward}
        used[train[0]] += reward["workers"]
    pools = {
        name: {"hardware": (hardware or {}).get(name, name), "devices": devices}
        for name, devices in used.items()
    }
    return ClusterConfig.parse(
        {
            "name": "rollart",
            "model": MODELS.get(model, model),
            "pools": {**pools, "cpu": {"hardware": "cpu", "devices": 64}},
            "rollout": [dict(entry) for entry in rollout],
            "train": {"pool": train[0], "devices": train[1], "colocated": colocated},
            "environment": {"pool": "cpu"},
            "reward": dict(reward),
            "weights": dict(weights),
            "workload": {name: DOMAINS[name].model_dump(exclude_none=True) for name in domains},
            **more,
        }
    )


def baseline(model: str, gpus: int = 128, **more: Any) -> ClusterConfig:
    """All H800, a quarter of them training: what RollArt's baselines run on, and its scaling runs."""
    training = gpus // TRAIN_SHARE
    return cluster_of(
        model,
        train=("h800", training),
        rollout=[engines("h800", gpus - training, ROLLOUT_TP[model])],
        **more,
    )


def affine(model: str, share: int = 1, **more: Any) -> ClusterConfig:
    """RollArt's own 96 H800 and 32 H20, in two clusters with Ethernet between them; or a `share`-th of it."""
    tensor_parallel = ROLLOUT_TP[model]
    return cluster_of(
        model,
        train=("h800", 32 // share),
        rollout=[
            engines("h800", 64 // share, tensor_parallel),
            engines("h20", 32 // share, tensor_parallel),
        ],
        affinity=affinity_of(more.get("domains", DOMAINS)),
        **{"weights": MOONCAKE, **more},
    )
