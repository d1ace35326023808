"""kill -9 at any moment, run again: nothing trained twice, nothing committed lost, the curve goes on."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

from tasks.campaign import Campaign
from tasks.report.run_files import RunFiles
from tests.e2e.campaigns import SUMS, buffer_of, manifests_of, saved, slow_turns, small_campaign

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start(campaign_file: Path, run: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.drive", str(campaign_file), run],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_to_the_end(campaign_file: Path, run: str) -> list[str]:
    process = start(campaign_file, run)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return output.splitlines()


def kill_after(process: subprocess.Popen[str], lines: int, seconds: float) -> list[str]:
    """SIGKILL to the driver alone, some time after it has said this many lines; its children must follow."""
    assert process.stdout is not None
    said = [process.stdout.readline().strip() for _ in range(lines)]
    time.sleep(seconds)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 4
    process.send_signal(signal.SIGKILL)
    process.wait()
    said += [line.strip() for line in process.stdout]
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == [], "a child outlived its run"
    return said


@pytest.mark.parametrize("seed", [1, 2])
def test_a_killed_run_resumes_with_nothing_lost_and_nothing_twice(
    model: Path, tmp_path: Path, seed: int
) -> None:
    campaign = small_campaign(
        model,
        tmp_path,
        domains={"sums": SUMS, "turns": slow_turns(latency_ms=30)},
        train={"steps": 9, "redundancy": {"groups": 1, "members": 1}, "checkpoint": {"every": 2}},
    )
    file, draw = saved(campaign, tmp_path), random.Random(seed)
    committed: dict[str, int] = {}
    for lines in (1, 3):
        kill_after(start(file, "run"), lines, draw.uniform(0, 0.6))
        committed |= dict(buffer_of(campaign, "run").names())
    run_to_the_end(file, "run")

    manifests = manifests_of(campaign, "run")
    assert [manifest.step for manifest in manifests] == list(range(9))
    names = [name for manifest in manifests for name in manifest.names]
    assert len(names) == len(set(names)) == 9 * 16
    retired = {group for manifest in manifests for group in manifest.retired_groups}
    trained_groups = {entry.group for manifest in manifests for entry in manifest.trajectories}
    waiting = dict(buffer_of(campaign, "run").names())
    for name in committed:
        group = int(name[1:9])
        assert group in retired | trained_groups or name in waiting, f"{name} was committed and is lost"

    metrics = RunFiles(tmp_path / "run").read_metrics()
    assert [row["step"] for row in metrics] == list(range(9))
    times = [row["time"] for row in metrics]
    assert times == sorted(times)


def test_a_run_killed_as_its_checkpoint_becomes_complete_has_a_row_of_metrics_for_every_step(
    model: Path, tmp_path: Path
) -> None:
    campaign = small_campaign(model, tmp_path, train={"steps": 4, "checkpoint": {"every": 2}})
    file = saved(campaign, tmp_path)
    process = start(file, "run")
    marker = tmp_path / "run" / "checkpoints" / "step-00000002" / "_SUCCESS"
    while not marker.exists():
        assert process.poll() is None, "the run ended before its first checkpoint"
        time.sleep(0.0002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert run_to_the_end(file, "run")[0] == "from 2"
    assert [row["step"] for row in RunFiles(tmp_path / "run").read_metrics()] == list(range(4))


def test_a_run_that_has_done_its_steps_ends_at_once(model: Path, tmp_path: Path) -> None:
    campaign = small_campaign(model, tmp_path, train={"steps": 1})
    file = saved(campaign, tmp_path)
    assert run_to_the_end(file, "run") == ["from 0", "step 0"]
    assert run_to_the_end(file, "run") == ["from 1"]


def test_in_mode_sync_plus_with_one_environment_at_a_time_a_resumed_run_is_bit_equal_to_an_unbroken_one(
    model: Path, tmp_path: Path
) -> None:
    campaign = small_campaign(
        model,
        tmp_path,
        domains={"sums": SUMS, "turns": slow_turns(latency_ms=1, turns=2)},
        environment={"workers": 1, "concurrent_trajectories": 1},
        train={"steps": 4, "mode": "sync_plus", "alpha": 0},
    )
    file = saved(campaign, tmp_path)
    run_to_the_end(file, "unbroken")
    for seconds in (0.1, 0.3):
        kill_after(start(file, "broken"), 2, seconds)
    said = run_to_the_end(file, "broken")
    assert said[0] != "from 0", "the run was not resumed"
    assert final_weights(campaign, "broken") == final_weights(campaign, "unbroken")


def final_weights(campaign: Campaign, run: str) -> dict[str, bytes]:
    """Every tensor of the last checkpoint, bit for bit."""
    folder = Path(campaign.stores.runs) / run / "checkpoints"
    newest = sorted(path for path in folder.iterdir() if (path / "_SUCCESS").exists())[-1]
    assert newest.name.endswith("4")
    return {
        f"{file.name}/{name}": tensor.tobytes()
        for file in newest.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
