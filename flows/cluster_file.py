"""A simulation's cluster file as the parameter of a deployment: a step of prefect.yaml."""

from typing import Any

from tasks.simulation.cluster import ClusterConfig


def cluster_file(file: str) -> dict[str, Any]:
    """The step's output: `cluster`, as Prefect's form shows it, every option written out.

    Raises `ClusterError`.
    """
    return {"cluster": ClusterConfig.load(file).model_dump(mode="json")}
