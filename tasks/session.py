"""A run that is up: engines, proxy, environments, trainer, stores; the protocol's steps are its methods.

`tasks.open_session` brings one up. The training loop calls the methods in its mode's order; nothing here
decides that order.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from blocks.sample_buffer import SampleBuffer
from infra.blocking_calls import in_daemon_thread
from infra.clock import now
from infra.launcher import Attendance, Launcher, Role, Service
from infra.rpc import RpcError
from tasks.campaign import Campaign
from tasks.environment.cluster import Environments
from tasks.report.run_files import RunFiles
from tasks.reward.usage import RewardMeter
from tasks.rollout.affinity_driver import AffinityDriver
from tasks.rollout.fleet import RolloutFleet
from tasks.run_folder import RunFolder
from tasks.supervision import Supervisor
from tasks.train.collector import Collector
from tasks.train.manifests import BatchManifest
from tasks.train.step_metrics import step_row

logger = logging.getLogger(__name__)

COLLECTING: tuple[Role, ...] = ("rollout", "environment", "reward")
"""The roles that work on a batch while it is collected."""
StepObserver = Callable[[dict[str, Any]], Awaitable[None]]
_current: ContextVar["Session"] = ContextVar("session")


class Session:
    def __init__(
        self,
        campaign: Campaign,
        folder: RunFolder,
        files: RunFiles,
        fleet: RolloutFleet,
        environments: Environments,
        trainer: Service,
        launcher: Launcher,
        collector: Collector,
        buffer: SampleBuffer,
        supervisor: Supervisor,
        version: int,
        started: float,
    ):
        self.campaign = campaign
        self.folder = folder
        self.files = files
        self.fleet = fleet
        self.environments = environments
        self.launcher = launcher
        self.step = version
        """The next train step, which is also the version of the trainer's weights."""
        self.served_version = version
        self.observers: list[StepObserver] = []
        self.affinity: AffinityDriver | None = None
        self._trainer = trainer
        self._collector = collector
        self._buffer = buffer
        self.supervisor = supervisor
        self._started = started
        self._step_started = now()
        self._stage_seconds: defaultdict[str, float] = defaultdict(float)
        self._push: asyncio.Task[None] | None = None
        self._generating_since = 0.0
        self._observing: asyncio.Task[None] | None = None
        self._rewards = RewardMeter(environments.reward_usage)
        self._recomputed = 0
        self._background: set[asyncio.Future[Any]] = set()
        self._batch: tuple[int, asyncio.Future[BatchManifest]] | None = None

    @property
    def finished(self) -> bool:
        return self.step >= self.campaign.train.steps

    async def begin(self) -> None:
        """Open admission. Everything a resumed run must know has been restored before this."""
        await self._rewards.restart()
        await self._collector.begin()
        self._step_started = now()
        self._generating_since = self.elapsed

    async def get_batch(self, step: int) -> BatchManifest:
        """Step 1: block until the sample buffer holds the batch, and commit it."""
        async with self.span("control", "get_batch", step), self._generation_attended(step) as attended:
            batch = await self._collector.get_batch(step)
            for role, attendance in attended.items():
                attendance.summary.update(stage_summary(role, batch))
            return batch

    @asynccontextmanager
    async def _generation_attended(self, step: int) -> AsyncIterator[dict[Role, Attendance]]:
        """The pools show that they generate, step environments and score for this step."""
        async with contextlib.AsyncExitStack() as stack:
            yield {
                role: await stack.enter_async_context(self.launcher.attend(role, step)) for role in COLLECTING
            }

    async def batch_ready(self, step: int) -> BatchManifest:
        """`get_batch` for several stages that wait for the same batch side by side."""
        if self._batch is None or self._batch[0] != step:
            self._batch = (step, asyncio.ensure_future(self.get_batch(step)))
        return await asyncio.shield(self._batch[1])

    async def observed(self) -> None:
        """Wait until the observers have heard of every step."""
        if self._observing is not None:
            await self._observing

    async def pushed(self) -> None:
        """Wait for the background push of the newest weights, if one is under way."""
        if self._push is not None:
            await self._push
            self._push = None

    def in_background(self, work: asyncio.Future[Any]) -> None:
        """Work that goes on while its starter waits for other things: it ends with the session."""
        self._background.add(work)
        work.add_done_callback(
            lambda done: None if done.cancelled() or done.exception() else self._background.discard(done)
        )

    async def abandon(self) -> None:
        """End what goes on in the background; nothing of it is waited for any more."""
        own = [self._push, self._observing, None if self._batch is None else self._batch[1]]
        pending = [work for work in [*own, *self._background] if work is not None]
        for work in pending:
            work.cancel()
        await self._rewards.stop()
        await asyncio.gather(*pending, return_exceptions=True)

    async def suspend(self, step: int) -> None:
        """Step 2: generation is frozen, what runs is kept."""
        async with self.span("control", "suspend", step):
            await self.fleet.suspend(stage=f"suspend {step}")
        self.files.append_span("engine", "generate", step, self._generating_since, self.elapsed)

    async def update(self, step: int) -> None:
        """Step 3: every engine takes the newest published version; the label advances once all have it."""
        async with self.span("weights", "update", step):
            if self.step != self.served_version:
                await self._load_weights(step)
                self.served_version = self.step

    async def _load_weights(self, step: int) -> None:
        """A version that lies damaged in the weight store is published again, once."""
        try:
            await self.fleet.load_weights(self.step, stage=f"update {step}")
        except RpcError as rejected:
            if "weights_rejected" not in str(rejected):
                raise
            logger.warning("version %d is published again: %s", self.step, rejected.message)
            await self._trainer.call("publish_weights", {"keep_from": self.served_version})
            await self.fleet.load_weights(self.step, stage=f"update {step}")

    async def resume(self, step: int) -> None:
        """Step 4: generation goes on; groups are begun under the new version."""
        async with self.span("control", "resume", step):
            await self.fleet.resume(stage=f"resume {step}")
            self._collector.version_advanced(self.served_version)
        self._generating_since = self.elapsed

    async def recompute(self, step: int) -> int:
        """Step 5: what was in flight rebuilds its KV under the new weights. Returns the tokens recomputed."""
        async with self.span("engine", "recompute", step):
            tokens = await self.fleet.recompute(stage=f"recompute {step}")
            self._recomputed += tokens
            return tokens

    async def train_step(self, batch: BatchManifest) -> dict[str, Any]:
        """Step 6: train on the batch, save, and begin the push of the new version in the background."""
        names = [(entry.name, entry.version) for entry in batch.trajectories]
        self._rewards.begin()
        async with self.span("trainer", "train_step", batch.step):
            metrics = await self._trainer.call(
                "train_step", {"step": batch.step, "trajectories": names}, stage=f"train {batch.step}"
            )
        self.step = batch.step + 1
        # Before the checkpoint: a run killed between the two does the step again and drops this row; the
        # other way round, it would go on after the step and the row would be missing for good.
        row = self._record(batch, metrics)
        if self.step % self.campaign.train.checkpoint.every == 0 or self.finished:
            async with self.span("trainer", "checkpoint", batch.step):
                # What a run resumed from this checkpoint elsewhere must find of the steps before it.
                await in_daemon_thread(partial(self.folder.upload, ("metrics.jsonl", "ends.jsonl")))
                await self._trainer.call("save_checkpoint", stage=f"checkpoint {batch.step}")
            self.supervisor.advice = advice(self.step)
            await self._evict()
        self._push = asyncio.create_task(self._publish(batch.step))
        return row

    async def _evict(self) -> None:
        """Drop what no batch can hold any more; the checkpoint just saved needs none of it."""
        if self.finished:
            await in_daemon_thread(partial(self._buffer.drop_before, self.step))
        elif self.campaign.stores.evict_samples:
            oldest = self._collector.oldest_version_needed(self.step)
            await in_daemon_thread(partial(self._buffer.drop_before, oldest))

    async def _publish(self, step: int) -> None:
        async with self.span("weights", "publish", step):
            await self._trainer.call(
                "publish_weights", {"keep_from": self.served_version}, stage=f"publish {step}"
            )
        async with self.span("weights", "pull", step):
            await self.fleet.prefetch(step + 1)

    def _record(self, batch: BatchManifest, metrics: dict[str, Any]) -> dict[str, Any]:
        """The step's row of metrics. The seconds of its checkpoint are in the row of the step after it."""
        row = step_row(
            batch,
            time=self.elapsed,
            stage_seconds=self._stage_seconds,
            step_seconds=now() - self._step_started,
            trainer=metrics,
            alpha=self.campaign.train.alpha,
            more={"tokens/recomputed": self._recomputed, **self._rewards.take()},
        )
        self._step_started, self._stage_seconds = now(), defaultdict(float)
        self._recomputed = 0
        self.files.append_metrics(row)
        self._observing = asyncio.create_task(self._observe(batch, row, self._observing))
        return row

    async def _observe(
        self, batch: BatchManifest, row: dict[str, Any], before: asyncio.Task[None] | None
    ) -> None:
        """Tell the observers of a step, in order, while the next goes on."""
        if before is not None:
            await before
        if self.affinity is not None:
            await self.affinity.step(batch)
        for observer in self.observers:
            await observer(row)

    @property
    def elapsed(self) -> float:
        """Seconds since this session began."""
        return now() - self._started

    @asynccontextmanager
    async def span(self, lane: str, stage: str, step: int) -> AsyncIterator[None]:
        """Time a stage: it goes into the timeline and into the step's metrics."""
        started = self.elapsed
        try:
            yield
        finally:
            ended = self.elapsed
            self._stage_seconds[stage] += ended - started
            self.files.append_span(lane=lane, stage=stage, step=step, start=started, end=ended)


def stage_summary(role: Role, batch: BatchManifest) -> dict[str, Any]:
    """What a stage did for a batch, as its task run shows it."""
    entries = batch.trajectories
    if role == "reward":
        rewards = [entry.reward for entry in entries]
        return {"rewards": len(rewards), "mean_reward": sum(rewards) / max(len(rewards), 1)}
    prefix = "outcomes/" if role == "environment" else "tokens/"
    counts = {name: value for name, value in batch.counts.items() if name.startswith(prefix)}
    return {"trajectories": len(entries), "turns": sum(entry.turns for entry in entries), **counts}


def current_session() -> Session:
    """The session that the surrounding flow opened. Raises LookupError outside of one."""
    return _current.get()


@contextmanager
def surrounding(session: Session) -> Iterator[None]:
    """What runs inside finds this session as the current one."""
    token = _current.set(session)
    try:
        yield
    finally:
        _current.reset(token)


def surrounding_session(folder: RunFolder) -> Session | None:
    """The session that a surrounding flow opened for the same run, if one did."""
    session = _current.get(None)
    return session if session is not None and session.folder == folder else None


def advice(checkpoint: int) -> str:
    """What to do about a lost part, with the step that the newest checkpoint holds."""
    return f"Start the same run again: it goes on from step {checkpoint}."
