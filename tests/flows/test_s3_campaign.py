"""A campaign through its flow with everything on S3, opened by a saved block: results, and no secret left."""

import json
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from infra.object_store import ObjectStore
from tests.e2e.campaigns import saved, small_campaign
from tests.s3_server import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
SAVE = """
import json, sys
from blocks.saved import ObjectStoreBlock
given = json.loads(sys.stdin.read())
ObjectStoreBlock(url="s3://tutti", **given).save("lab", overwrite=True)
"""


def run(
    command: list[str], environment: dict[str, str], given: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        input=given,
    )


def test_a_campaign_lies_on_s3_whole_and_its_credentials_nowhere(
    prefect_server: dict[str, str], s3: S3Server, model: Path, tmp_path: Path
) -> None:
    environment = {name: value for name, value in prefect_server.items() if not name.startswith("AWS_")}
    given = {
        "options": {"endpoint_url": s3.endpoint},
        "credentials": {"key": s3.key, "secret": s3.secret},
    }
    done = run([sys.executable, "-c", SAVE], environment, json.dumps(given))
    assert done.returncode == 0, done.stderr[-3000:]

    root = f"s3://tutti/{uuid.uuid4().hex}"
    campaign = small_campaign(
        model,
        tmp_path / "runs",
        stores={"runs": str(tmp_path / "runs"), "root": root, "block": "lab", "upload_every_s": 1},
        train={"steps": 2},
    )
    command = [sys.executable, "-m", "flows.campaign", str(saved(campaign, tmp_path)), "--run", "first"]
    done = run(command, environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"{root}/first" in done.stdout

    store = ObjectStore(root, s3.options)
    local = tmp_path / "runs/first"
    for name in ("campaign.yaml", "metrics.jsonl", "timeline.jsonl", "evaluation.json", "report.html"):
        assert store.get(f"first/{name}") == (local / name).read_bytes(), name
    keys = store.list()
    assert any(key.startswith("first/tensorboard/") for key in keys)
    assert {"first/logs/trainer.log", "first/logs/engine-0.log"} <= set(keys)

    # Prefect's results: JSON, readable without Prefect.
    evaluation = json.loads(store.get("first/evaluation.json"))
    records = [json.loads(store.get(key)) for key in keys if key.startswith("first/results/")]
    assert {record["metadata"]["serializer"]["type"] for record in records} == {"json"}
    results = [json.loads(record["result"]) for record in records]
    assert evaluation in results
    intervals = [result for result in results if set(result) == {"sums", "turns"}]
    assert len(intervals) == 2
    assert all(result["sums"]["episodes"] == 8 for result in intervals)

    again = run(command, environment)
    assert again.returncode == 2
    assert "run first exists" in again.stderr

    places = {
        "output": (done.stdout + done.stderr + again.stderr).encode(),
        **{key: store.get(key) for key in keys},
    }
    home = Path(environment["PREFECT_HOME"])
    for folder in (tmp_path, home):
        places |= {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert any(name.endswith("prefect.db") for name in places)
    for name, content in places.items():
        for secret in (s3.secret, s3.key):
            assert secret.encode() not in content, name


def test_a_block_that_is_not_there_is_one_error_before_anything_starts(
    prefect_server: dict[str, str], model: Path, tmp_path: Path
) -> None:
    stores = {"runs": str(tmp_path / "runs"), "root": "s3://b/p", "block": "absent"}
    campaign = small_campaign(model, tmp_path / "runs", stores=stores)
    done = run([sys.executable, "-m", "flows.campaign", str(saved(campaign, tmp_path))], prefect_server)
    assert done.returncode == 2
    assert "stores.block" in done.stderr
    assert "absent" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
