"""Troubles of what a run works with: environments, rewards, the disk, a bucket of weights."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.campaigns import SUMS
from tests.e2e.chaos.run import Attempt, Outcome, chaos_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Record = Callable[[Outcome], None]
DOMAINS = "tests.e2e.chaos.domains"


def nothing(_: Attempt) -> None: ...


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("domain", "end"),
    [
        pytest.param(
            {"source": f"{DOMAINS}:Hangs", "step_limit_s": 1}, "environment_timeout", id="environment-hangs"
        ),
        pytest.param({"source": f"{DOMAINS}:Resets"}, "environment_error", id="one-reset-in-ten-fails"),
        pytest.param(
            {"reward": f"{DOMAINS}:hangs_at_times", "reward_limit_s": 1}, None, id="reward-times-out"
        ),
    ],
)
def test_failing_episodes_are_counted_and_the_run_goes_on(
    model: Path, tmp_path: Path, domain: dict[str, object], end: str | None, record: Record
) -> None:
    run = chaos_run(model, tmp_path, domains={"troubled": {**SUMS, **domain}}, train={"groups": 3})
    outcome = run.endure(f"episodes of {next(iter(domain.values()))}", nothing, after_step=0)
    record(outcome)
    assert outcome.went_on
    counts = run.counts()
    assert counts["failures"] > 0
    if end is not None:
        assert counts[f"outcomes/{end}"] > 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, soon full."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160m", "none", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting takes root: {mounted.stderr.decode()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_is_the_runs_one_error(model: Path, small_disk: Path, record: Record) -> None:
    run = chaos_run(model, small_disk)
    ballast = small_disk / "ballast"

    def fill(_: Attempt) -> None:
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    outcome = run.endure("disk full", fill, heal=ballast.unlink)
    record(outcome)
    assert outcome.error.startswith("the disk")


@pytest.mark.chaos
def test_a_truncated_bucket_of_weights_is_published_again(
    model: Path, tmp_path: Path, record: Record
) -> None:
    run = chaos_run(model, tmp_path)
    weights = run.folder.root / "weights"

    def truncate(_: Attempt) -> None:
        """Every bucket of the next version, as soon as it is there and before its manifest is."""
        known, cut = set(weights.rglob("*.safetensors")), set()
        deadline = time.monotonic() + 60
        while not (cut and any(path.parents[1].joinpath("manifest.json").exists() for path in cut)):
            assert time.monotonic() < deadline, "no version was published"
            for bucket in set(weights.rglob("*.safetensors")) - known - cut:
                os.truncate(bucket, 1000)
                cut.add(bucket)
            time.sleep(0.0005)

    outcome = run.endure("bucket truncated", truncate)
    record(outcome)
    assert outcome.went_on
    assert "is published again" in "\n".join(run.attempts[0].errors)
