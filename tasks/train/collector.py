"""Carries out what the ledger decides: starts and cancels members, and turns ready groups into batches."""

import asyncio
import itertools
from collections.abc import Sequence

from blocks.sample_buffer import SampleBuffer
from tasks.environment.cluster import EnvironmentCluster
from tasks.rollout.fleet import RolloutFleet
from tasks.train.lease import TrainerLease
from tasks.train.ledger import Batch, Cancel, Instruction, Ledger, Start, reward_of
from tasks.train.manifests import BatchManifest, ManifestEntry, ManifestHistory, commit
from tasks.trajectory import TrajectoryHeader


class Collector:
    def __init__(
        self,
        ledger: Ledger,
        fleet: RolloutFleet,
        environments: EnvironmentCluster,
        buffer: SampleBuffer,
        lease: TrainerLease,
        history: ManifestHistory,
        version: int,
    ):
        """Batches in `history` from step `version` on were committed before the run was broken off, and are
        trained again because no checkpoint holds them."""
        self._ledger = ledger
        self._fleet = fleet
        self._environments = environments
        self._buffer = buffer
        self._lease = lease
        self._history = history
        self._replay = {batch.step: batch for batch in history.manifests if batch.step >= version}
        self._changed = asyncio.Event()
        self._problem: Exception | None = None
        self._aborts: set[asyncio.Task[None]] = set()

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
                await self._fleet.set_oldest_admissible(self._ledger.oldest_admissible_version)
            self._perform(instructions)
            if batch is not None:
                return await asyncio.to_thread(self._commit, batch)
            await self._changed.wait()

    def version_advanced(self, version: int) -> None:
        self._perform(self._ledger.version_advanced(version))

    async def stop(self) -> None:
        for abort in self._aborts:
            abort.cancel()
        await asyncio.gather(*self._aborts, return_exceptions=True)

    def _commit(self, batch: Batch) -> BatchManifest:
        manifest = BatchManifest(
            step=batch.step,
            epoch=self._lease.epoch,
            trajectories=[
                ManifestEntry(
                    name=str(header.key),
                    version=header.initiating_version,
                    oldest_version=header.oldest_version,
                    domain=header.domain,
                    group=group.group,
                    reward=reward_of(header),
                    turns=header.turns,
                    tokens=header.tokens,
                    sampled_tokens=header.sampled_tokens,
                )
                for group in batch.groups
                for header in group.members
            ],
            retired_groups=batch.retired_groups,
            counts=dict(batch.counts),
        )
        return commit(self._buffer, manifest, self._lease, self._history)

    def _on_end(self, header: TrajectoryHeader) -> None:
        try:
            self._perform(self._ledger.member_ended(header))
        except RuntimeError as problem:
            self._problem = problem
        self._changed.set()

    def _perform(self, instructions: Sequence[Instruction]) -> None:
        starts = [instruction.member for instruction in instructions if isinstance(instruction, Start)]
        for _, members in itertools.groupby(starts, key=lambda member: member.key.group):
            self._environments.submit(list(members), self._on_end)
        cancels = [instruction for instruction in instructions if isinstance(instruction, Cancel)]
        for reason in {cancel.reason for cancel in cancels}:
            names = [str(cancel.key) for cancel in cancels if cancel.reason == reason]
            abort = asyncio.create_task(self._fleet.abort(names, reason))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)
