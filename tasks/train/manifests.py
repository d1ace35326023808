"""Batch manifests: which trajectories each train step consumes, for good.

A step's batch is committed by one conditional write of its manifest. What is consumed is what manifests
name, so a trainer killed at any moment resumes with nothing lost and nothing trained twice: the step it had
committed but not finished is trained from its manifest, and what no manifest names is still to be consumed.
"""

from collections.abc import Iterable
from typing import Protocol

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    ValidationError,
    model_validator,
)

from blocks.sample_buffer import Sample, SampleBuffer
from tasks.trajectory import TrajectoryKey


class ManifestError(RuntimeError):
    """The manifests of a run contradict one another, or one cannot be read."""


class ConsumedTwice(ManifestError):
    """A manifest names a trajectory that an earlier one, or the same, has consumed."""


class OutOfOrder(ManifestError):
    """A manifest is not of the step that follows the last committed one."""


class ManifestEntry(BaseModel):
    """One trajectory of a batch, with what a reader of the run asks of it without opening it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    version: NonNegativeInt  # the initiating policy version, where its object lies
    oldest_version: NonNegativeInt  # the oldest that sampled one of its tokens
    domain: str
    group: NonNegativeInt
    reward: FiniteFloat
    turns: NonNegativeInt
    tokens: NonNegativeInt
    sampled_tokens: NonNegativeInt


class BatchManifest(BaseModel):
    """The batch of one train step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: NonNegativeInt
    epoch: NonNegativeInt  # fencing token of the trainer that wrote it
    trajectories: list[ManifestEntry]
    retired_groups: list[NonNegativeInt] = Field(default_factory=list)
    """Groups resolved since the last manifest, consumed or dropped for good: never to be started again."""
    counts: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Numbers of the step that a resumed run needs to go on counting, for example wasted tokens."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> "BatchManifest":
        names = self.names
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"the manifest of step {self.step} names {', '.join(twice[:8])} twice")
        return self

    @property
    def names(self) -> list[str]:
        return [trajectory.name for trajectory in self.trajectories]

    @property
    def samples(self) -> list[Sample]:
        """Where the batch lies in the sample buffer, in the manifest's order."""
        return [Sample(trajectory.name, trajectory.version) for trajectory in self.trajectories]


class Fence(Protocol):
    """What a commit asks of the trainer's lease."""

    @property
    def epoch(self) -> int: ...

    def check(self) -> None:
        """Raises `LeaseLost` when another trainer holds a higher epoch."""


class ManifestHistory:
    """What the manifests so far consume. Pure: it is told of manifests and judges the next."""

    def __init__(self, manifests: Iterable[BatchManifest] = ()):
        self.manifests: list[BatchManifest] = []
        self.consumed: set[str] = set()
        self.retired_groups: set[int] = set()
        for manifest in manifests:
            self.add(manifest)

    @property
    def next_step(self) -> int | None:
        """The step to commit next; None when nothing is committed and the first may be any."""
        return self.manifests[-1].step + 1 if self.manifests else None

    def require_next(self, manifest: BatchManifest) -> None:
        """Raises `OutOfOrder` or `ConsumedTwice` unless this manifest may follow."""
        if self.next_step is not None and manifest.step != self.next_step:
            raise OutOfOrder(
                f"the manifest of step {manifest.step} would follow that of step {self.next_step - 1}"
            )
        twice = sorted(self.consumed.intersection(manifest.names))
        if twice:
            raise ConsumedTwice(
                f"the manifest of step {manifest.step} names {len(twice)} trajectories that earlier steps "
                f"consumed: {', '.join(twice[:8])}"
            )

    def add(self, manifest: BatchManifest) -> None:
        self.require_next(manifest)
        self.manifests.append(manifest)
        self.consumed.update(manifest.names)
        self.retired_groups.update(manifest.retired_groups)

    def versions_from(self, step: int) -> list[int]:
        """The versions under which the trajectories of the batches from `step` on lie in the buffer."""
        batches = (batch for batch in self.manifests if batch.step >= step)
        return [entry.version for batch in batches for entry in batch.trajectories]

    def unconsumed(self, held: Iterable[Sample]) -> list[Sample]:
        """Of the trajectories in the buffer, those still to be consumed, each name once, sorted.

        Left out are consumed names and those of retired groups. A name that lies under two versions (its
        attempt was repeated after a restart) counts once, with the newer.
        """
        newest: dict[str, int] = {}
        for name, version in held:
            newest[name] = max(version, newest.get(name, version))
        return sorted(
            Sample(name, version)
            for name, version in newest.items()
            if name not in self.consumed and TrajectoryKey.parse(name).group not in self.retired_groups
        )


def read_manifests(buffer: SampleBuffer) -> dict[int, BatchManifest]:
    """All manifests of a run by step, ascending. Raises `ManifestError` when one cannot be read."""
    steps = buffer.batches()
    return {step: _parse(step, data) for step, data in zip(steps, buffer.read_batches(steps), strict=True)}


def commit(
    buffer: SampleBuffer, manifest: BatchManifest, lease: Fence, history: ManifestHistory | None = None
) -> BatchManifest:
    """Commit the batch of a step and return the manifest that stands.

    It is another than the one given when the step has one already: a trainer that has since lost the lease
    committed it at the last moment. The caller trains the batch that stands; its own trajectories stay
    unconsumed unless that names them. `history`, which the caller keeps from step to step, saves reading all
    manifests each time; the one that stands is added to it. Raises `LeaseLost`, `OutOfOrder` or
    `ConsumedTwice`, and then nothing is committed unless the lease was lost at the last moment.
    """
    if manifest.epoch != lease.epoch:
        raise ManifestError(f"the manifest of step {manifest.step} is not of epoch {lease.epoch}")
    if history is None:
        before = [found for step, found in read_manifests(buffer).items() if step < manifest.step]
        history = ManifestHistory(before)
    history.require_next(manifest)
    lease.check()
    standing = manifest
    if not buffer.commit_batch(manifest.step, manifest.model_dump_json().encode()):
        standing = _parse(manifest.step, buffer.read_batches([manifest.step])[0])
    # A takeover between check and write has either read this manifest or will meet it as the one that stands.
    lease.check()
    history.add(standing)
    return standing


def consumed_names(manifests: Iterable[BatchManifest]) -> set[str]:
    """Every trajectory that the manifests consume. Raises `ConsumedTwice` when two name the same."""
    return ManifestHistory(manifests).consumed


def _parse(step: int, data: bytes) -> BatchManifest:
    try:
        manifest = BatchManifest.model_validate_json(data)
    except ValidationError as error:
        raise ManifestError(f"the manifest of step {step} cannot be read: {error}") from None
    if manifest.step != step:
        raise ManifestError(f"the manifest of step {step} says it is of step {manifest.step}")
    return manifest
