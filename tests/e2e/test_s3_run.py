"""A run whose every store, and the copy of its files, lies on S3: killed, and resumed on an empty machine."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from blocks.sample_buffer import SampleBuffer
from infra.object_store import ObjectStore
from tasks.campaign import Campaign
from tasks.report.run_files import RunFiles
from tasks.train.manifests import read_manifests
from tests.e2e.campaigns import SUMS, saved, slow_turns, small_campaign
from tests.s3_server import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start(campaign_file: Path, s3: S3Server) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.drive", str(campaign_file), "run"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **s3.environment},
    )


def test_a_killed_run_resumes_from_s3_alone_and_leaves_its_files_there(
    model: Path, tmp_path: Path, s3: S3Server
) -> None:
    root = f"s3://tutti/{uuid.uuid4().hex}"
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    steps = 6
    campaign = small_campaign(
        model,
        here,
        stores={"runs": str(here), "root": root, "upload_every_s": 0.5},
        domains={"sums": SUMS, "turns": slow_turns(latency_ms=20)},
        train={"steps": steps, "redundancy": {"groups": 1, "members": 1}, "checkpoint": {"every": 2}},
    )
    run = start(saved(campaign, tmp_path), s3)
    assert run.stdout is not None
    said = [run.stdout.readline().strip() for _ in range(4)]
    assert said == ["from 0", "step 0", "step 1", "step 2"]
    store = ObjectStore(f"{root}/run", s3.options)
    buffer = SampleBuffer(store.sub("samples"))
    time.sleep(random.uniform(0, 0.3))
    children = psutil.Process(run.pid).children(recursive=True)
    for process in (psutil.Process(run.pid), *children):
        assert s3.secret not in " ".join(process.cmdline())
    run.send_signal(signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    committed = dict(buffer.names())

    shutil.rmtree(here)
    moved = Campaign.parse(
        {**campaign.model_dump(mode="json"), "stores": {"runs": str(elsewhere), "root": root}}
    )
    (tmp_path / "resumed").mkdir()
    resumed = start(saved(moved, tmp_path / "resumed"), s3)
    output, _ = resumed.communicate(timeout=400)
    assert resumed.returncode == 0
    first = output.splitlines()[0]
    assert first in ("from 2", "from 4")

    manifests = list(read_manifests(buffer).values())
    assert [manifest.step for manifest in manifests] == list(range(steps))
    names = [name for manifest in manifests for name in manifest.names]
    assert len(names) == len(set(names)) == steps * 16
    retired = {group for manifest in manifests for group in manifest.retired_groups}
    groups = {entry.group for manifest in manifests for entry in manifest.trajectories}
    waiting = dict(buffer.names())
    lost = [name for name in committed if int(name[1:9]) not in retired | groups and name not in waiting]
    assert lost == []

    # The run is whole at its URL, with nothing of the local folder.
    copy = tmp_path / "copy"
    for name in ("metrics.jsonl", "timeline.jsonl", "campaign.yaml"):
        assert store.get(name) == (elsewhere / "run" / name).read_bytes()
        ObjectStore(str(copy)).put(name, store.get(name))
    files = RunFiles(copy)
    assert [row["step"] for row in files.read_metrics()] == list(range(steps))
    assert {span.step for span in files.read_spans()} >= set(range(int(first.split()[1]), steps))
    assert Campaign.load(files.campaign_file).stores.root == root
    keys = store.list()
    assert {key.split("/")[0] for key in keys} >= {
        "samples",
        "weights",
        "checkpoints",
        "logs",
        "metrics.jsonl",
    }
    assert sum(key.startswith("samples/archive/") for key in keys) == steps
    assert sorted(path.name for path in (elsewhere / "run").iterdir()) == [
        ".mirror",
        "bindings.json",
        "campaign.yaml",
        "ends.jsonl",
        "logs",
        "metrics.jsonl",
        "timeline.jsonl",
    ]

    secret = s3.secret.encode()
    for key in keys:
        assert secret not in store.get(key), key
    for path in elsewhere.rglob("*"):
        assert not path.is_file() or secret not in path.read_bytes(), path
