"""Deployment files, by the tools that know their formats. No image is built: there is no engine for it."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import jsonschema
import kubernetes_validate
import pytest
import yaml
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas import FlowRun
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from infra.deploy.slurm.environments import CONFIG, BadConfig, make_cluster, read_config
from infra.deploy.work_pools import POOLS, UnknownPool, base_job_template

DEPLOY = Path(__file__).parents[2] / "infra" / "deploy"
IMAGES = sorted((DEPLOY / "images").glob("*.Dockerfile"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
TOOLS = Path(sys.executable).parent


def documents() -> list[Any]:
    return list(_documents())


def _documents() -> Iterator[Any]:
    for path in MANIFESTS:
        if path.name != "kustomization.yaml":
            for index, document in enumerate(yaml.safe_load_all(path.read_text())):
                yield pytest.param(document, id=f"{path.stem}-{index}-{document['kind']}")


def pods() -> list[Any]:
    """The pod specifications of all manifests."""
    return list(_pods())


def _pods() -> Iterator[Any]:
    for parameter in documents():
        (document,) = parameter.values
        spec = document.get("spec", {})
        if document["kind"] in ("Deployment", "StatefulSet"):
            yield pytest.param(spec["template"]["spec"], id=parameter.id)
        if document["kind"] == "DaskCluster":
            yield pytest.param(spec["worker"]["spec"], id=f"{parameter.id}-worker")
            yield pytest.param(spec["scheduler"]["spec"], id=f"{parameter.id}-scheduler")


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_images_pass_the_linter_and_do_not_run_as_root(path):
    linted = run(TOOLS / "hadolint", "--no-color", path)
    assert linted.returncode == 0, linted.stdout
    users = re.findall(r"^USER (.+)$", path.read_text(), re.MULTILINE)
    assert users == ["10001:10001"]


def test_the_linter_finds_what_it_is_there_for(tmp_path):
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python\nRUN cd /tmp && pip install numpy\n")
    assert run(TOOLS / "hadolint", bad).returncode != 0


@pytest.mark.parametrize("document", documents())
def test_manifests_are_what_kubernetes_accepts(document):
    if document["kind"] == "DaskCluster":
        jsonschema.validate(document, _dask_schema())
        for part in ("worker", "scheduler"):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": part}}
            spec = document["spec"][part]["spec"]
            kubernetes_validate.validate(
                {**pod, "spec": spec}, kubernetes_validate.latest_version(), strict=True
            )
    else:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == "tutti"


def _dask_schema() -> dict[str, Any]:
    """Of the operator's own custom resource."""
    package = find_spec("dask_kubernetes")
    assert package is not None
    assert package.submodule_search_locations is not None
    chart = Path(package.submodule_search_locations[0]) / "operator/deployment/helm/dask-kubernetes-operator"
    resource = yaml.safe_load((chart / "crds" / "daskcluster.yaml").read_text())
    schema: dict[str, Any] = resource["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return {**schema, "required": ["spec"]}


def test_a_wrong_manifest_is_refused():
    document = next(
        parameter.values[0] for parameter in documents() if parameter.values[0]["kind"] == "StatefulSet"
    )
    wrong = {**document, "spec": {**document["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("pod", pods())
def test_pods_run_without_root_and_within_limits(pod):
    _assert_restricted(pod)


def _assert_restricted(pod: dict[str, Any]) -> None:
    """Of the Pod Security Standard `restricted`, and limits on what a pod takes."""
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] > 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


def test_what_kustomize_applies_is_there_and_leaves_out_only_the_secrets_shape():
    names = set(yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"])
    assert names == {path.name for path in MANIFESTS} - {"kustomization.yaml", "secrets.example.yaml"}


def test_secrets_that_pods_name_have_a_shape_and_hold_no_secret():
    shapes = {
        document["metadata"]["name"]: document["stringData"]
        for document in yaml.safe_load_all((DEPLOY / "kubernetes" / "secrets.example.yaml").read_text())
    }
    text = "\n".join(path.read_text() for path in MANIFESTS)
    named = set(re.findall(r"secretRef: \{name: ([\w-]+)\}|secretName: ([\w-]+)", text))
    assert {one or other for one, other in named} == shapes.keys()
    for values in shapes.values():
        for key, value in values.items():
            if re.search(r"KEY|PASSWORD|AUTH_STRING|CONNECTION_URL|json", key):
                assert "change-me" in value


@pytest.mark.parametrize("pool", POOLS)
async def test_work_pools_jobs_are_what_kubernetes_accepts(pool):
    """As Prefect's worker fills the template in for a flow run."""
    configuration = await KubernetesWorkerJobConfiguration.from_template_and_values(
        base_job_template(pool),
        {"command": "prefect flow-run execute", "env": {"A": "b"}, "image": "registry.example/tutti:1"},
        client=PrefectClient("http://127.0.0.1:9/api"),
    )
    configuration.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="some-run"))
    manifest = configuration.job_manifest
    pod = manifest["spec"]["template"]["spec"]
    for field in ("completions", "parallelism"):
        pod.pop(field)  # Prefect insists on them; a pod has none, and Kubernetes ignores them
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    _assert_restricted(pod)
    (container,) = pod["containers"]
    assert container["image"] == "registry.example/tutti:1"
    assert container["args"] == ["prefect", "flow-run", "execute"]
    assert container["resources"]["limits"].get("nvidia.com/gpu") == (POOLS[pool].gpus or None)
    assert pod["nodeSelector"] == {"tutti/pool": pool}


def test_pools_are_those_of_the_deployments_and_of_the_manifests_workers():
    prefect_yaml = yaml.safe_load((DEPLOY.parents[1] / "prefect.yaml").read_text())
    deployed = {deployment["work_pool"]["name"] for deployment in prefect_yaml["deployments"]}
    workers = yaml.safe_load_all((DEPLOY / "kubernetes" / "prefect-workers.yaml").read_text())
    polled = {worker["spec"]["template"]["metadata"]["labels"]["pool"] for worker in workers}
    assert deployed == polled == set(POOLS)
    with pytest.raises(UnknownPool, match="'tpu'"):
        base_job_template("tpu")


def test_slurm_jobs_start_workers_with_what_the_configuration_asks_for():
    cluster = make_cluster()
    try:
        script = cluster.job_script()
        address = cluster.scheduler_address
    finally:
        cluster.close()
    asked = set(re.findall(r"^#SBATCH (.+)$", script, re.MULTILINE))
    assert {"-J tutti-environments", "-p cpu", "--cpus-per-task=32", "-t 24:00:00", "--no-requeue"} <= asked
    command = script.strip().splitlines()[-1]
    assert address in command
    assert "--nworkers 4" in command
    assert command.endswith("--no-dashboard --nthreads=32")
    assert run("bash", "-n", "-c", script).returncode == 0


def test_a_slurm_configuration_without_a_size_is_refused_by_name(tmp_path):
    path = tmp_path / "jobqueue.yaml"
    path.write_text(CONFIG.read_text().replace("    cores: 32", "    colours: 32"))
    with pytest.raises(BadConfig, match=r"jobqueue\.slurm\.cores"):
        read_config(path)
    path.write_text("jobqueue: {}")
    with pytest.raises(BadConfig, match=r"section jobqueue\.slurm"):
        read_config(path)


def test_the_batch_script_is_sound_and_asks_for_its_pool():
    script = DEPLOY / "slurm" / "pool-worker.sbatch"
    checked = run(TOOLS / "shellcheck", script)
    assert checked.returncode == 0, checked.stdout
    refused = subprocess.run(["bash", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "name the work pool" in refused.stderr
