"""A campaign as a child process that can be harmed, and what must hold of its run afterwards."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from infra.object_store import ObjectStore
from tasks.campaign import Campaign
from tasks.report.run_files import RunFiles
from tasks.run_folder import RunFolder
from tasks.train.lease import Holder, TrainerLease
from tests.e2e.campaigns import SUMS, buffer_of, manifests_of, saved, slow_turns, small_campaign

MARK = "TUTTI_CHAOS"
LOST = 3
"""Exit status of a run that says which part it lost."""
_READ_LIMIT_S = 10.0
"""A frozen store keeps its reader waiting for minutes."""


@dataclass
class Attempt:
    """One start of a run: `python -m tests.e2e.drive`, or the command that a user types."""

    command: list[str]
    environment: dict[str, str]
    typed: bool
    metrics: Path
    """The run's `metrics.jsonl`, which a row a step is appended to."""
    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def start(self) -> "Attempt":
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **self.environment, MARK: self.mark},
        )
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self.lines), (self.process.stderr, self.errors))
        ]
        for reader in self._readers:
            reader.start()
        return self

    def _read(self, stream, lines: list[str]) -> None:  # type: ignore[no-untyped-def]
        for line in stream:
            lines.append(line.rstrip())

    def wait_row(self, limit_s: float = 240) -> None:
        """Return once this attempt has done a step, or its last."""
        self._wait(lambda: any(line.startswith("step ") for line in list(self.lines)), limit_s)

    def wait_step(self, step: int, limit_s: float = 240) -> None:
        self._wait(lambda: self.last_step >= step, limit_s)

    def _wait(self, arrived: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not arrived():
            status = self.process.poll()
            assert status is None or arrived(), f"it ended with {status}: {self.errors[-40:]}"
            assert time.monotonic() < deadline, f"nothing: {self.lines[-5:]} {self.errors[-20:]}"
            time.sleep(0.02)

    @property
    def last_step(self) -> int:
        """The last step that is done, in this attempt or before it; -1 without one."""
        rows = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        return max((json.loads(row)["step"] for row in rows if row.endswith("}")), default=-1)

    def wait_end(self, limit_s: float = 240) -> int:
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(
                f"it hangs: {self.lines[-5:]} {self.errors[-40:]}; its stacks are not known"
            ) from None
        for reader in self._readers:
            reader.join(10)
        return status

    def end(self) -> None:
        """SIGKILL to whatever is left of it."""
        for process in self.processes():
            process.kill()
        self.process.wait()

    def processes(self) -> list[psutil.Process]:
        """Everything that runs and inherited this attempt's mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def running(self, words: str) -> list[psutil.Process]:
        """Those whose command line holds these words, oldest first."""
        found = []
        for process in self.processes():
            try:
                if words in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return sorted(found, key=lambda process: process.create_time())


@dataclass
class Outcome:
    """A row of the chaos table."""

    case: str
    went_on: bool
    error: str
    noticed_s: float
    """From the harm to the end of the run with all of its processes, or to the second step after it."""
    recovered_s: float
    """From the resumed run's start to its first step; 0 where the run went on."""

    def __str__(self) -> str:
        what = "went on" if self.went_on else f"stopped ({self.error}) and resumed"
        return (
            f"{self.case}: {what}; noticed in {self.noticed_s:.1f} s, recovered in {self.recovered_s:.1f} s"
        )


class ChaosRun:
    """A run named `run` of one campaign, started as often as it takes."""

    def __init__(self, campaign: Campaign, folder: Path, environment: dict[str, str] | None = None):
        self.campaign = campaign
        self.file = saved(campaign, folder)
        self.environment = environment or {}
        self.committed: dict[str, int] = {}
        self.attempts: list[Attempt] = []
        self.typed = False
        """Whether it is started by the command that a user types, as a Prefect flow."""

    @property
    def folder(self) -> RunFolder:
        return RunFolder.of(self.campaign, "run")

    def start(self) -> Attempt:
        command = [sys.executable, "-m", "tests.e2e.drive", str(self.file), "run"]
        if self.typed:
            resume = ["--resume"] if self.attempts else []
            command = [sys.executable, "-m", "flows.campaign", str(self.file), "--run", "run", *resume]
        metrics = self.folder.root / "metrics.jsonl"
        self.attempts.append(Attempt(command, self.environment, self.typed, metrics).start())
        return self.attempts[-1]

    def endure(
        self,
        case: str,
        harm: Callable[[Attempt], None],
        *,
        heal: Callable[[], None] | None = None,
        after_step: int = 1,
        limit_s: float = 240,
        killed: bool = False,
    ) -> Outcome:
        """Start the run, harm it after a step, and bring it to its last step: by itself or started again.

        Its invariants are checked at the end. `heal` undoes what a user would have to undo first. `killed`
        says that the harm ends the campaign's own process, which then can tell nothing.
        """
        attempt = self.start()
        try:
            attempt.wait_step(after_step)
            self.remember()
            harmed, before = time.monotonic(), attempt.last_step
            harm(attempt)
            status = self._end_or_step(attempt, before, limit_s)
            noticed = time.monotonic() - harmed
            if status is None:
                status = attempt.wait_end(limit_s)
            if status == 0:
                self.check(attempt)
                return Outcome(case, True, "", noticed, 0)
            expected = -signal.SIGKILL if killed else LOST
            assert status == expected, f"exit status {status}: {attempt.errors[-40:]}"
            error = "killed" if killed else require_one_error(attempt)
            require_nothing_left(attempt)
            noticed = time.monotonic() - harmed
            if heal is not None:
                heal()
            self.remember()
            started = time.monotonic()
            resumed = self.start()
            if not self.typed:  # the command prints a line for people, not a line a step
                resumed.wait_row()
            recovered = time.monotonic() - started
            assert resumed.wait_end(limit_s) == 0, resumed.errors[-40:]
            self.check(resumed)
            return Outcome(case, False, error, noticed, recovered)
        finally:
            for one in self.attempts:
                one.end()

    def outlive(
        self, harms: list[tuple[str, Callable[[Attempt], None]]], limit_s: float = 240
    ) -> list[Outcome]:
        """Harm one attempt again and again, each time two steps after the harm before; it must reach its end
        by itself. Its invariants are checked then."""
        attempt, outcomes = self.start(), []
        try:
            attempt.wait_step(0)
            for case, harm in harms:
                self.remember()
                harmed, before = time.monotonic(), attempt.last_step
                harm(attempt)
                status = self._end_or_step(attempt, before, limit_s)
                assert status is None, f"{case}: it ended with {status}: {attempt.errors[-40:]}"
                outcomes.append(Outcome(case, True, "", time.monotonic() - harmed, 0))
            assert attempt.wait_end(limit_s) == 0, attempt.errors[-40:]
            self.check(attempt)
            return outcomes
        finally:
            attempt.end()

    def remember(self) -> None:
        """What is committed now must be accounted for at the end."""
        reading = threading.Thread(target=self._read_committed, daemon=True)
        reading.start()
        reading.join(_READ_LIMIT_S)

    def _read_committed(self) -> None:
        with contextlib.suppress(Exception):  # the store may be what was harmed
            self.committed |= dict(buffer_of(self.campaign, "run").names())

    def counts(self) -> Counter[str]:
        """How trajectories ended, over all steps."""
        counts: Counter[str] = Counter()
        for manifest in manifests_of(self.campaign, "run"):
            counts.update(manifest.counts)
        return counts

    def _end_or_step(self, attempt: Attempt, before: int, limit_s: float) -> int | None:
        """Wait for a step that began after the harm, or for the end."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            status = attempt.process.poll()
            if status is not None:
                attempt.wait_end()
                return status
            if attempt.last_step >= before + 2:
                return None
            time.sleep(0.05)
        stacks = attempt.errors[-40:]
        attempt.end()
        raise AssertionError(f"the run hangs after step {attempt.last_step}: {stacks}")

    def check(self, last: Attempt) -> None:
        """No trajectory trained twice, no committed one lost, every step once, nothing left behind."""
        steps = self.campaign.train.steps
        manifests = manifests_of(self.campaign, "run")
        assert [manifest.step for manifest in manifests] == list(range(steps))
        names = [name for manifest in manifests for name in manifest.names]
        assert len(names) == len(set(names)), "a trajectory was trained twice"
        retired = {group for manifest in manifests for group in manifest.retired_groups}
        trained = {entry.group for manifest in manifests for entry in manifest.trajectories}
        waiting = dict(buffer_of(self.campaign, "run").names())
        lost = [
            name for name in self.committed if int(name[1:9]) not in retired | trained and name not in waiting
        ]
        assert lost == [], "committed trajectories are lost"
        rows = RunFiles(self.folder.root).read_metrics()
        assert [row["step"] for row in rows] == list(range(steps))
        archived = [
            key for key in ObjectStore(self.folder.samples_url).list("archive") if key.endswith(".parquet")
        ]
        assert len(archived) == steps
        require_nothing_left(last)
        # From another host nothing but a release tells that the holder is gone, so this would wait otherwise.
        elsewhere = Holder(host="another-node", pid=1, started=0.0)
        store = ObjectStore(self.folder.samples_url)
        asyncio.run(asyncio.wait_for(TrainerLease.acquire(store, holder=elsewhere), 5))


def require_one_error(attempt: Attempt) -> str:
    """The first line of what the run said when it ended: one error, with what to do, and no stack."""
    text = "\n".join(attempt.errors)
    if not attempt.typed:  # Prefect logs the stack of every flow that fails
        assert "Traceback" not in text, text
    assert "never retrieved" not in text, text
    said = [line for line in attempt.errors if " is lost: " in line]
    assert said, text
    assert "Start the same run again: it goes on from step" in text, text
    return said[-1].partition(" is lost: ")[0].rpartition(": ")[2].strip()


def require_nothing_left(attempt: Attempt) -> None:
    """Every process of the attempt ends within a grace."""
    deadline = time.monotonic() + 15
    while left := attempt.processes():
        if time.monotonic() > deadline:
            raise AssertionError(f"left behind: {[(p.pid, p.status(), p.cmdline()) for p in left]}")
        time.sleep(0.2)


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


def freeze(process: psutil.Process) -> None:
    process.send_signal(signal.SIGSTOP)


def chaos_run(model: Path, folder: Path, variables: dict[str, str] | None = None, **changes: Any) -> ChaosRun:
    """`variables` are of the run's process environment, `changes` of its campaign.

    Six steps with a checkpoint every two, and limits that tell slow from frozen within seconds."""
    sums = {
        **SUMS,
        "reward": "tests.e2e.chaos.domains:even_length",
        "reward_limit_s": 2,
        "step_limit_s": 2,
        "reset_limit_s": 2,
    }
    turns = {**slow_turns(30), "step_limit_s": 2, "reset_limit_s": 2}
    options = {
        "domains": {"sums": sums, "turns": turns},
        "supervision": {"every_s": 2, "silence_limit_s": 10},
        **changes,
        "train": {"steps": 6, "checkpoint": {"every": 2}, **changes.pop("train", {})},
    }
    return ChaosRun(small_campaign(model, folder, **options), folder, variables)
