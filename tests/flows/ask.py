"""What a Prefect server knows of the runs on it."""

import asyncio
import json
import os
import sys
from collections import Counter
from typing import Any


async def ask() -> dict[str, Any]:
    from prefect.client.orchestration import get_client

    async with get_client() as client:
        flows = {flow.id: flow.name for flow in await client.read_flows()}
        flow_runs = await client.read_flow_runs()
        task_runs = await client.read_task_runs(limit=200)
        artifacts = await client.read_artifacts(limit=200)
        deployments = await client.read_deployments()
    return {
        "flow_runs": Counter(f"{flows[run.flow_id]}: {run.state_name}" for run in flow_runs),
        "task_runs": Counter(f"{run.name.split()[0]}: {run.state_name}" for run in task_runs),
        "artifacts": sorted({artifact.key for artifact in artifacts if artifact.key}),
        "deployments": sorted(f"{flows[item.flow_id]}/{item.name}" for item in deployments),
        "schedules": {item.name: len(item.schedules) for item in deployments},
    }


if __name__ == "__main__":
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "ERROR")
    json.dump(asyncio.run(ask()), sys.stdout)
