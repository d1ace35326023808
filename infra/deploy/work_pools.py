"""Base job templates of the Kubernetes work pools: `python -m infra.deploy.work_pools POOL > POOL.json`, then
`prefect work-pool create POOL --type kubernetes --base-job-template POOL.json`.

Each is the installed prefect-kubernetes' own template with what the pool's hardware needs. What an
administrator changes most (image, GPUs, memory, node labels) are the template's variables: a form in the
dashboard.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any

NAMESPACE = "tutti"
SECRETS = ("tutti-s3", "tutti-prefect")
"""Their keys become environment variables of every pod: S3 keys, and the address and key of Prefect's API."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """One pod of a pool, as it is unless a deployment says otherwise."""

    description: str
    image: str
    gpus: int
    cpus: str
    memory: str
    shared_memory: str
    node: str  # value of the node label tutti/pool

    @property
    def needs_gpus(self) -> bool:
        return self.gpus > 0


POOLS = {
    "compute-gpu": PoolShape(
        "Rollout on GPUs strong in compute", "tutti-rollout:latest", 8, "32", "256Gi", "32Gi", "compute-gpu"
    ),
    "bandwidth-gpu": PoolShape(
        "Rollout on GPUs strong in memory bandwidth",
        "tutti-rollout:latest",
        8,
        "32",
        "256Gi",
        "32Gi",
        "bandwidth-gpu",
    ),
    "train-gpu": PoolShape(
        "Training: all GPUs of one node", "tutti-training:latest", 8, "64", "512Gi", "64Gi", "train-gpu"
    ),
    "cpu": PoolShape(
        "Environments, rewards and campaigns", "tutti-environment:latest", 0, "8", "32Gi", "2Gi", "cpu"
    ),
}
"""By Prefect work pool, as `infra.cluster` and prefect.yaml name them."""


class UnknownPool(ValueError):
    """There is no such pool."""


def base_job_template(pool: str) -> dict[str, Any]:
    """The template of a pool. Raises `UnknownPool`; needs the package prefect-kubernetes."""
    from prefect_kubernetes.worker import KubernetesWorker

    if pool not in POOLS:
        raise UnknownPool(f"there is no pool {pool!r}, only {', '.join(POOLS)}")
    shape = POOLS[pool]
    template: dict[str, Any] = KubernetesWorker.get_default_base_job_template()
    variables = template["variables"]["properties"]
    for name, default in {
        "namespace": NAMESPACE,
        "image": shape.image,
        "service_account_name": "tutti",
        "image_pull_policy": "IfNotPresent",
        "finished_job_ttl": 3600,
        "backoff_limit": 0,  # a retried process would not find the run that it was started for
        "cpu_request": shape.cpus,
        "cpu_limit": shape.cpus,
        "memory_request": shape.memory,
        "memory_limit": shape.memory,
    }.items():
        variables[name]["default"] = default
    variables["node_label"] = {
        "title": "Node label",
        "description": "Pods go to nodes whose label tutti/pool has this value.",
        "type": "string",
        "default": shape.node,
    }
    job = template["job_configuration"]["job_manifest"]["spec"]
    pod = job["template"]["spec"]
    pod["automountServiceAccountToken"] = False
    pod["nodeSelector"] = {"tutti/pool": "{{ node_label }}"}
    pod["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    pod["volumes"] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": shape.shared_memory}},
        {"name": "models", "persistentVolumeClaim": {"claimName": "tutti-models", "readOnly": True}},
    ]
    (container,) = pod["containers"]
    container["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    container["envFrom"] = [{"secretRef": {"name": name}} for name in SECRETS]
    container["volumeMounts"] = [
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "models", "mountPath": "/models", "readOnly": True},
    ]
    if shape.needs_gpus:
        variables["gpus"] = {
            "title": "GPUs",
            "description": "GPUs of each pod.",
            "type": "integer",
            "minimum": 1,
            "default": shape.gpus,
        }
        for kind in ("requests", "limits"):
            container["resources"][kind]["nvidia.com/gpu"] = "{{ gpus }}"
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return template


def main() -> int:
    parser = argparse.ArgumentParser(description="Print a work pool's base job template.")
    parser.add_argument("pool", choices=list(POOLS))
    print(json.dumps(base_job_template(parser.parse_args().pool), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
