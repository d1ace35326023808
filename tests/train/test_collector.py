"""The collector on a real ledger, buffer and lease; engines and environments only note what they are told."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from blocks.sample_buffer import SampleBuffer
from infra.object_store import ObjectStore
from tasks.report.run_files import RunFiles
from tasks.train.collector import Collector
from tasks.train.config import GrpoConfig, TrainConfig
from tasks.train.lease import TrainerLease
from tasks.train.ledger import Ledger
from tasks.train.manifests import ManifestHistory
from tasks.trajectory import MemberSpec, StopReason, TrajectoryHeader
from tests.builders import header_for

Listener = Callable[[TrajectoryHeader], None]


class Doors:
    """Both the fleet and the environments, as far as the collector speaks to them."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[str]]] = []
        self.running: dict[str, tuple[MemberSpec, Listener]] = {}
        self.submitted = asyncio.Event()
        self.aborted = asyncio.Event()

    async def set_oldest_admissible(self, version: int) -> None:
        await asyncio.sleep(0)

    async def expect(self, names: list[str]) -> None:
        await asyncio.sleep(0.01)
        self.told.append(("expect", names))

    async def finish(self, names: list[str]) -> None:
        self.told.append(("finish", names))

    async def abort(self, names: list[str], reason: StopReason) -> None:
        self.told.append(("abort", names))
        self.aborted.set()

    def submit(self, members: list[MemberSpec], listener: Listener) -> None:
        self.told.append(("submit", [str(member.key) for member in members]))
        self.running |= {str(member.key): (member, listener) for member in members}
        self.submitted.set()

    def end(self, name: str, **changes: Any) -> None:
        member, listener = self.running.pop(name)
        listener(header_for(member, **changes))


@asynccontextmanager
async def collecting(
    directory: Path, **train: Any
) -> AsyncIterator[tuple[Collector, Doors, Ledger, RunFiles]]:
    config = TrainConfig(
        groups=1, group_size=2, algorithm=GrpoConfig(zero_variance="keep"), **{"steps": 1, **train}
    )
    ledger = Ledger(weights={"a": 1.0}, train=config, seed=0, temperature=1.0, attempts=1, failure_budget=10)
    store, doors, files = ObjectStore(str(directory / "samples")), Doors(), RunFiles(directory).create()
    async with TrainerLease.held(store) as lease:
        door: Any = doors
        collector = Collector(
            ledger, door, door, SampleBuffer(store), lease, ManifestHistory(), 0, files, config
        )
        yield collector, doors, ledger, files
        await collector.stop()


async def test_in_lockstep_the_proxy_hears_of_a_trajectory_before_it_starts_and_of_its_end(
    tmp_path: Path,
) -> None:
    async with collecting(tmp_path, mode="sync", alpha=0, steps=1) as (collector, doors, ledger, _):
        await collector.begin()
        await doors.submitted.wait()
        first, second = sorted(doors.running)
        doors.end(first)
        ledger_says = ledger.deadline_passed(0)
        collector._perform(ledger_says)
        await doors.aborted.wait()
    assert doors.told == [
        ("expect", [first, second]),
        ("submit", [first, second]),
        ("finish", [first]),
        ("abort", [second]),
    ]


async def test_a_group_is_closed_when_its_deadline_has_passed(tmp_path: Path) -> None:
    async with collecting(tmp_path, group_deadline_s=0.2) as (collector, doors, _, files):
        await collector.begin()
        quick, hangs = sorted(doors.running)
        doors.end(quick)
        batch = await collector.get_batch(0)
        assert batch.names == [quick]
        assert batch.counts["groups/overdue"] == 1
        assert [name for what, names in doors.told if what == "abort" for name in names] == [hangs]
        doors.end(hangs, stop=StopReason.CANCELLED)
    fates = {row["key"]: (row["step"], row["fate"]) for row in files.read_ends()}
    assert fates == {quick: (0, "trained"), hangs: (0, "cancelled")}, "ends after the last batch are written"


async def test_samples_of_a_batch_are_needed_until_its_step_is_trained(tmp_path: Path) -> None:
    async with collecting(tmp_path, steps=5) as (collector, doors, ledger, _):
        await collector.begin()
        for name in sorted(doors.running)[:2]:
            doors.end(name)
        await collector.get_batch(0)
        ledger.version_advanced(1)
        for name in sorted(doors.running)[:2]:
            doors.end(name, oldest_version=1)
        await collector.get_batch(1)
        assert ledger.oldest_version_needed == 1
        assert collector.oldest_version_needed(1) == 0, "begun under version 0, first token under version 1"
        assert collector.oldest_version_needed(2) == 1
