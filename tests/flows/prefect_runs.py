"""What a Prefect server knows of one campaign's runs, asked over its API."""

import time
from collections import defaultdict
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class PrefectApi:
    def __init__(self, url: str):
        self._url = url
        self._session = requests.Session()
        # As Prefect's own client: 503 is SQLite's lock, held by another request.
        retry = Retry(total=10, backoff_factor=0.5, status_forcelist=[503], allowed_methods=None)
        self._session.mount("http://", HTTPAdapter(max_retries=retry))

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._session.post(f"{self._url}/{path}", json=body or {}, timeout=60)
        answer.raise_for_status()
        return answer.json()

    def get(self, path: str) -> Any:
        answer = self._session.get(f"{self._url}/{path}", timeout=60)
        answer.raise_for_status()
        return answer.json()

    def start(self, deployment: str, parameters: dict[str, Any]) -> str:
        """Run a deployment; the id of its flow run."""
        found = self.get(f"deployments/name/{deployment}")
        run = self.post(f"deployments/{found['id']}/create_flow_run", {"parameters": parameters})
        return str(run["id"])

    def flow_run(self, flow_run: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"flow_runs/{flow_run}")
        return found

    def end_of(self, flow_run: str, limit_s: float) -> dict[str, Any]:
        """The flow run, once it is in a final state."""
        deadline = time.monotonic() + limit_s
        while True:
            found = self.flow_run(flow_run)
            if found["state_type"] in FINAL:
                return found
            assert time.monotonic() < deadline, f"{found['name']} is still {found['state_name']}"
            time.sleep(0.5)

    def hosts_of(self, run: str) -> list[dict[str, Any]]:
        """Flow runs of pool hosts that a campaign's run started."""
        found: list[dict[str, Any]] = self.post(
            "flow_runs/filter",
            {"flow_runs": {"tags": {"all_": [run]}}, "flows": {"name": {"any_": ["pool-host"]}}},
        )
        return found

    def stages_by_pool(self, run: str) -> dict[str, dict[str, str]]:
        """For each work pool, the task runs of this campaign's run on it: name and state."""
        pools = {host["id"]: host["work_pool_name"] for host in self.hosts_of(run)}
        tasks = self.post("task_runs/filter", {"flow_runs": {"id": {"any_": list(pools)}}})
        stages: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for task in tasks:
            stages[pools[task["flow_run_id"]]][task["name"]] = task["state_type"]
        return dict(stages)

    def tickets(self) -> list[str]:
        blocks = self.post("block_documents/filter", {"include_secrets": False})
        return [block["name"] for block in blocks if (block["name"] or "").startswith("tutti-ticket")]
