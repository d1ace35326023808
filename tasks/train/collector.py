"""Carries out what the ledger decides: starts and cancels members, and turns ready groups into batches."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from blocks.sample_buffer import SampleBuffer
from infra.blocking_calls import in_daemon_thread
from infra.rpc import RpcError
from tasks.environment.cluster import Environments
from tasks.report.run_files import RunFiles
from tasks.rollout.fleet import RolloutFleet
from tasks.train.config import TrainConfig
from tasks.train.lease import TrainerLease
from tasks.train.ledger import Batch, Cancel, Instruction, Ledger, Start, manifest_of
from tasks.train.manifests import BatchManifest, ManifestHistory, commit
from tasks.train.modes import MODES
from tasks.trajectory import MemberSpec, TrajectoryHeader

logger = logging.getLogger(__name__)


class Collector:
    def __init__(
        self,
        ledger: Ledger,
        fleet: RolloutFleet,
        environments: Environments,
        buffer: SampleBuffer,
        lease: TrainerLease,
        history: ManifestHistory,
        version: int,
        files: RunFiles,
        train: TrainConfig,
    ):
        """Batches in `history` from step `version` on were committed before the run was broken off, and are
        trained again because no checkpoint holds them. `files` get what became of each trajectory. In a mode
        of lockstep the proxy is told of every trajectory that it must wait for, and of its end."""
        self._ledger = ledger
        self._fleet = fleet
        self._environments = environments
        self._buffer = buffer
        self._lease = lease
        self._history = history
        self._files = files
        self._replay = {batch.step: batch for batch in history.manifests if batch.step >= version}
        self._changed = asyncio.Event()
        self._problem: Exception | None = None
        self._taken: Batch | None = None  # the newest
        self._last_step = train.steps - 1
        self._lockstep = MODES[train.mode].lockstep
        self._group_deadline_s = train.group_deadline_s
        self._deadlines: dict[int, asyncio.TimerHandle] = {}  # by group
        self._orders: set[asyncio.Task[None]] = set()
        self._order = asyncio.Lock()  # the proxy hears of a trajectory's beginning before its end

    async def begin(self) -> None:
        await self._fleet.set_oldest_admissible(self._ledger.oldest_admissible_version)
        self._perform(self._ledger.begin())

    async def get_batch(self, step: int) -> BatchManifest:
        """Wait until the sample buffer holds the batch of `step`, and commit it.

        Raises what the ledger raised when trajectories keep failing or carry no signal.
        """
        if step in self._replay:
            return self._replay.pop(step)
        while True:
            if self._problem is not None:
                raise self._problem
            self._changed.clear()
            batch, instructions = self._ledger.take_batch()
            if batch is not None:
                self._taken = batch
                await self._fleet.set_oldest_admissible(self._ledger.oldest_admissible_version)
            self._perform(instructions)
            if batch is not None:
                return await in_daemon_thread(partial(self._commit, batch))
            await self._changed.wait()

    def version_advanced(self, version: int) -> None:
        self._perform(self._ledger.version_advanced(version))

    def oldest_version_needed(self, step: int) -> int:
        """No trajectory begun before this version will be read for the batch of `step` or a later one."""
        return min([self._ledger.oldest_version_needed, *self._history.versions_from(step)])

    async def stop(self) -> None:
        """End what is under way. Of a finished run, what ended after the last batch is written with it."""
        for deadline in self._deadlines.values():
            deadline.cancel()
        for order in self._orders:
            order.cancel()
        await asyncio.gather(*self._orders, return_exceptions=True)
        rest = self._ledger.rest() if self._ledger.next_step > self._last_step else []
        if rest:
            with contextlib.suppress(OSError):  # it must not keep the other parts from being stopped
                self._files.append_ends([end.row(self._last_step) for end in rest])

    def _commit(self, batch: Batch) -> BatchManifest:
        manifest = manifest_of(batch, self._lease.epoch)
        # Before the commit: a run killed between the two drops these lines when it is resumed.
        self._files.append_ends([end.row(batch.step) for end in batch.ends])
        return commit(self._buffer, manifest, self._lease, self._history)

    def _on_end(self, header: TrajectoryHeader) -> None:
        if self._lockstep:
            # Its worker says so too, unless it died.
            self._give(partial(self._fleet.finish, [str(header.key)]))
        try:
            self._perform(self._ledger.member_ended(header))
        except RuntimeError as problem:
            self._problem = problem
        self._changed.set()

    def _on_deadline(self, group: int) -> None:
        del self._deadlines[group]
        try:
            self._perform(self._ledger.deadline_passed(group))
        except RuntimeError as problem:
            self._problem = problem
        self._changed.set()

    def _perform(self, instructions: Sequence[Instruction]) -> None:
        starts = [instruction.member for instruction in instructions if isinstance(instruction, Start)]
        if starts and self._lockstep:
            self._give(partial(self._begin_expected, starts))
        else:
            self._submit(starts)
        cancels = [instruction for instruction in instructions if isinstance(instruction, Cancel)]
        for reason in dict.fromkeys(cancel.reason for cancel in cancels):
            names = [str(cancel.key) for cancel in cancels if cancel.reason == reason]
            self._give(partial(self._fleet.abort, names, reason))

    async def _begin_expected(self, members: Sequence[MemberSpec]) -> None:
        try:
            await self._fleet.expect([str(member.key) for member in members])
        finally:
            self._submit(members)  # without a proxy they end with a fault, and are counted

    def _submit(self, members: Sequence[MemberSpec]) -> None:
        for group, siblings in itertools.groupby(members, key=lambda member: member.key.group):
            self._environments.submit(list(siblings), self._on_end)
            if self._group_deadline_s is not None and group not in self._deadlines:
                loop = asyncio.get_running_loop()
                self._deadlines[group] = loop.call_later(self._group_deadline_s, self._on_deadline, group)

    def _give(self, order: Callable[[], Awaitable[None]]) -> None:
        """Have the proxy carry out an order, beside everything else."""
        task = asyncio.create_task(self._carry_out(order))
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def _carry_out(self, order: Callable[[], Awaitable[None]]) -> None:
        try:
            async with self._order if self._lockstep else contextlib.nullcontext():
                await order()
        except RpcError as problem:  # the proxy is gone, which its supervision reports, or refuses
            logger.warning("the proxy did not carry out an order: %s", problem)
