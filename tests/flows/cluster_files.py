"""A cluster file for the campaigns of `tests.e2e.campaigns`."""

from pathlib import Path

import yaml


def cluster_for(model: Path, folder: Path, **changes: object) -> Path:
    """Two cores that generate and train the model of a directory, in `folder`."""
    short = {"prompt_tokens": 10, "response_tokens": 3, "observation_tokens": 5}
    data = {
        "name": "cores",
        "model": str(model),
        "pools": {"cores": {"hardware": "cpu", "devices": 2}},
        "rollout": [{"pool": "cores", "devices": 1}],
        "train": {"pool": "cores", "devices": 1},
        "environment": {"pool": "cores"},
        "weights": {"transport": "store", "push_gb_s": 0.5, "pull_gb_s": 0.5},
        "workload": {"sums": short, "turns": {**short, "turns": 4, "step_s": 0.02}},
        **changes,
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(data))
    return path
