"""The ledger of a run: which groups are open, which are ready, what each batch took. Pure.

It hears events (a member ended, the policy version advanced) and answers with instructions (start this
member, cancel that one); it knows no clock, network or event loop. A thin driver performs them, the same one
in a real run and in simulation.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tasks.environment.redundancy import GroupProgress, counts
from tasks.train.admission import capacity, horizon_slots
from tasks.train.advantages import has_signal
from tasks.train.batching import DomainQuota, ReadyGroup, choose
from tasks.train.config import TrainConfig
from tasks.train.ends import End, Ends, Fate, end_counts
from tasks.train.manifests import BatchManifest, ManifestEntry
from tasks.train.modes import MODES
from tasks.train.staleness import oldest_admissible
from tasks.trajectory import MemberSpec, Reward, StopReason, TrajectoryHeader, TrajectoryKey

HELD_OUT_SEEDS_FROM = 1_000_000_007
"""Training draws environment seeds below this, evaluation from here on."""


class NoSignal(RuntimeError):
    """Groups keep coming back with all rewards equal, so there is nothing to learn from."""


class TooManyFailures(RuntimeError):
    """More trajectories failed in one step than the campaign allows."""


@dataclass(frozen=True, slots=True)
class Start:
    member: MemberSpec


@dataclass(frozen=True, slots=True)
class Cancel:
    key: TrajectoryKey
    reason: StopReason


Instruction = Start | Cancel


@dataclass(frozen=True, slots=True)
class Batch:
    """What a train step is given, and what became of everything else since the batch before."""

    step: int
    groups: list[ReadyGroup]
    retired_groups: list[int]  # dropped for good since the batch before
    counts: Counter[str]
    ends: list[End] = field(default_factory=list)  # whose fate was decided since the batch before


class Ledger:
    def __init__(
        self,
        *,
        weights: Mapping[str, float],
        train: TrainConfig,
        seed: int,
        temperature: float,
        attempts: int,
        failure_budget: int,
    ):
        self._domains = list(weights)
        self._train = train
        self._mode = MODES[train.mode]
        self._seed = seed
        self._temperature = temperature
        self._attempts = attempts
        self._failure_budget = failure_budget
        self._quota = DomainQuota(weights, train.groups)
        self.version = 0
        self.next_step = 0
        self._open: dict[int, GroupProgress] = {}
        self._initiated: dict[int, int] = {}  # open group -> the version it was begun under
        self._ready: dict[int, ReadyGroup] = {}
        self._begun: Counter[str] = Counter()  # domain -> groups that are open, ready or trained
        self._gaps: dict[str, list[int]] = {domain: [] for domain in self._domains}
        self._next_ordinal: Counter[str] = Counter()
        self._cancelling: set[TrajectoryKey] = set()
        self._retired: list[int] = []
        self._counts: Counter[str] = Counter()
        self._ends = Ends()

    def restore(
        self,
        *,
        version: int,
        next_step: int,
        trained: Iterable[tuple[int, str]],
        retired: Iterable[int],
        committed: Iterable[TrajectoryHeader],
    ) -> None:
        """Take up a run where it was broken off, before any member is started.

        `trained` are the (group, domain) of every batch so far, `retired` the groups dropped for good,
        `committed` the headers of trajectories that lie in the sample buffer. Members that were committed and
        not trained are kept; groups that were begun and have nothing to show are begun again.
        """
        self.version = version
        self.next_step = next_step
        finished = set(retired)
        for group, domain in trained:
            finished.add(group)
            self._begun[domain] += 1
        kept: dict[int, list[TrajectoryHeader]] = {}
        for header in committed:
            if header.key.group not in finished:
                kept.setdefault(header.key.group, []).append(header)
        for index, domain in enumerate(self._domains):
            mine = [group for group in finished | kept.keys() if group % len(self._domains) == index]
            begun = max(mine, default=-1) // len(self._domains) + 1 if mine else 0
            self._next_ordinal[domain] = begun
            self._gaps[domain] = [
                ordinal for ordinal in range(begun) if ordinal * len(self._domains) + index not in mine
            ]
        for group, headers in sorted(kept.items()):
            progress = self._progress(group, headers[0].domain)
            for header in sorted(headers, key=lambda header: header.key):
                if progress.done.setdefault(header.key.member, header) is header:
                    self._ends.wait(header)
                else:  # an earlier attempt was committed too, though its announcement was lost
                    self._ends.over(header, Fate.CANCELLED)
            self._open[group] = progress
            self._begun[progress.domain] += 1
            self._initiated[group] = min(header.initiating_version for header in headers)

    def begin(self) -> list[Instruction]:
        """Start what there is room for, and what a restored group still lacks."""
        instructions = self._cancel_too_old()
        for group in list(self._open):
            progress = self._open[group]
            if len(progress.done) < progress.size:
                instructions += self._starts(group, progress.launch())
            if progress.is_complete:
                instructions += self._close(group)
        return instructions + self._fill()

    def version_advanced(self, version: int) -> list[Instruction]:
        """Every engine serves this version now."""
        self.version = version
        return self._fill()

    def member_ended(self, header: TrajectoryHeader) -> list[Instruction]:
        """A trajectory ended, for whatever reason. Raises `TooManyFailures` or `NoSignal`."""
        if header.key in self._cancelling:
            self._cancelling.discard(header.key)
            self._count_end(header)
            stale = header.stop is StopReason.STALE
            self._ends.over(header, Fate.STALE if stale else Fate.CANCELLED)
            return []
        progress = self._open.get(header.key.group)
        if progress is None or progress.running.get(header.key.member) != header.key.attempt:
            return []
        self._count_end(header)
        self._decide_end(header)
        retry = progress.ended(header)
        instructions: list[Instruction] = []
        if retry is not None:
            instructions += self._starts(header.key.group, [(header.key.member, retry)])
        elif progress.is_complete:
            instructions += self._close(header.key.group)
        return instructions + self._fill()

    def deadline_passed(self, group: int) -> list[Instruction]:
        """The group has run for `train.group_deadline_s`: what it has must do, or another takes its place.

        Of a group that is not open any more this is no news.
        """
        if group not in self._open:
            return []
        self._counts["groups/overdue"] += 1
        return self._close(group) + self._fill()

    def take_batch(self) -> tuple[Batch | None, list[Instruction]]:
        """The next step's batch if its groups are ready; what has become too old by then is dropped."""
        instructions = self._cancel_too_old()
        chosen = choose(list(self._ready.values()), self._quota.of_batch(self.next_step))
        if chosen is None:
            return None, instructions + self._fill()
        for group in chosen:
            del self._ready[group.group]
            self._ends.decide(group.group, Fate.TRAINED, group.members)
        self.next_step += 1
        instructions += self._cancel_too_old() if self.next_step < self._train.steps else self._cancel_all()
        batch = self._batch(self.next_step - 1, chosen)
        return batch, instructions + self._fill()

    def rest(self) -> list[End]:
        """What was decided since the last batch, each once: of a run that is over no batch will tell."""
        return self._ends.take()

    @property
    def oldest_admissible_version(self) -> int:
        """Trajectories begun before this version get no further turn; 0 in a mode without this bound."""
        if not self._mode.bounds_staleness:
            return 0
        return oldest_admissible(self.next_step, self._train.alpha)

    @property
    def oldest_version_needed(self) -> int:
        """No trajectory begun before this version is waiting, running, or will be begun."""
        waiting = (member for ready in self._ready.values() for member in ready.members)
        begun = (member.initiating_version for member in waiting)
        return min([self.version, *self._initiated.values(), *begun])

    @property
    def running_members(self) -> int:
        return sum(len(progress.running) for progress in self._open.values())

    @property
    def ready_groups(self) -> int:
        return len(self._ready)

    @property
    def groups_held(self) -> frozenset[int]:
        """Groups that are open or ready: a batch may still hold them."""
        return frozenset(self._open.keys() | self._ready.keys())

    def _fill(self) -> list[Instruction]:
        over = self.next_step >= self._train.steps
        if over or self.version < oldest_admissible(self.next_step, self._train.alpha):
            return []
        slots = horizon_slots(
            version=self.version,
            alpha=self._train.alpha,
            groups_per_batch=self._train.groups,
            steps=self._train.steps,
            redundant_groups=self._train.redundancy.groups,
            last_batch=self.next_step if self._mode.one_batch_at_a_time else None,
        )
        instructions: list[Instruction] = []
        for domain, places in capacity(self._quota, slots, self._begun).items():
            for _ in range(places):
                instructions += self._begin_group(domain)
        return instructions

    def _begin_group(self, domain: str) -> list[Instruction]:
        if self._gaps[domain]:
            ordinal = self._gaps[domain].pop(0)
        else:
            ordinal = self._next_ordinal[domain]
            self._next_ordinal[domain] += 1
        group = ordinal * len(self._domains) + self._domains.index(domain)
        progress = self._progress(group, domain)
        self._open[group] = progress
        self._begun[domain] += 1
        self._initiated[group] = self.version
        return self._starts(group, progress.launch())

    def _progress(self, group: int, domain: str) -> GroupProgress:
        return GroupProgress(
            group, domain, self._train.group_size, self._train.redundancy.members, self._attempts
        )

    def _starts(self, group: int, launched: list[tuple[int, int]]) -> list[Instruction]:
        domain = self._open[group].domain
        environment_seed = derived_seed(self._seed, "environment", group) % HELD_OUT_SEEDS_FROM
        return [
            Start(
                MemberSpec(
                    key=TrajectoryKey(group, member, attempt),
                    domain=domain,
                    environment_seed=environment_seed,
                    sampling_seed=derived_seed(self._seed, "sampling", group, member, attempt),
                    initiating_version=self.version,
                    temperature=self._temperature,
                )
            )
            for member, attempt in launched
        ]

    def _close(self, group: int) -> list[Instruction]:
        """All that a group needs is there, or all that can come has come."""
        progress = self._open.pop(group)
        del self._initiated[group]
        instructions = self._cancel_running(progress, StopReason.CANCELLED)
        ready = ReadyGroup(group, progress.domain, progress.members)
        self._counts["groups/generated"] += 1
        if len(ready.members) < progress.size:
            self._counts["groups/short"] += 1
        if not ready.members:
            self._drop(ready, Fate.FAILED)
            return instructions
        if not has_signal([reward_of(member) for member in ready.members]):
            self._counts["groups/zero_variance"] += 1
            if self._train.algorithm.zero_variance == "refill":
                self._drop(ready, Fate.ZERO_VARIANCE)
                self._check_signal()
                return instructions
        self._ready[group] = ready
        return instructions

    def _check_signal(self) -> None:
        tries = self._train.algorithm.refill_tries * self._train.groups
        if self._counts["groups/dropped/zero_variance"] > tries:
            generated = self._counts["groups/generated"]
            useful = generated - self._counts["groups/zero_variance"]
            raise NoSignal(
                f"step {self.next_step}: only {useful} of {generated} groups have rewards that differ. "
                "Make the domains easier or harder, or change train.algorithm.zero_variance or refill_tries"
            )

    def _batch(self, step: int, groups: list[ReadyGroup]) -> Batch:
        """The batch with all that was decided since the one before."""
        ends = self._ends.take()
        for end in ends:
            if end.fate is not Fate.TRAINED:
                self._counts[f"tokens/wasted/{end.fate}"] += end.header.sampled_tokens
        batch = Batch(step, groups, self._retired, self._counts, ends)
        self._retired, self._counts = [], Counter()
        return batch

    def _cancel_too_old(self) -> list[Instruction]:
        """Give up what the next batch may not hold, and all batches after it."""
        bound = self.oldest_admissible_version
        for ready in [group for group in self._ready.values() if group.oldest_version < bound]:
            self._drop(ready, Fate.STALE)
        open_groups = [group for group, version in self._initiated.items() if version < bound]
        return self._give_up(open_groups, StopReason.STALE, Fate.STALE)

    def _cancel_all(self) -> list[Instruction]:
        """Give up what is left when the last batch is there."""
        for ready in list(self._ready.values()):
            self._drop(ready, Fate.CANCELLED)
        return self._give_up(list(self._open), StopReason.CANCELLED, Fate.CANCELLED)

    def _give_up(self, open_groups: list[int], reason: StopReason, fate: Fate) -> list[Instruction]:
        instructions: list[Instruction] = []
        for group in open_groups:
            progress = self._open.pop(group)
            del self._initiated[group]
            instructions += self._cancel_running(progress, reason)
            self._drop(ReadyGroup(group, progress.domain, tuple(progress.done.values())), fate)
        return instructions

    def _cancel_running(self, progress: GroupProgress, reason: StopReason) -> list[Instruction]:
        keys = [
            TrajectoryKey(progress.group, member, attempt) for member, attempt in progress.running.items()
        ]
        progress.running.clear()
        self._cancelling.update(keys)
        return [Cancel(key, reason) for key in keys]

    def _drop(self, ready: ReadyGroup, fate: Fate) -> None:
        self._ready.pop(ready.group, None)
        self._begun[ready.domain] -= 1
        self._retired.append(ready.group)
        self._counts[f"groups/dropped/{fate}"] += 1
        self._ends.decide(ready.group, fate)

    def _count_end(self, header: TrajectoryHeader) -> None:
        self._counts[f"outcomes/{header.stop}"] += 1
        self._counts["tokens/sampled"] += header.sampled_tokens
        self._counts["rollout/turns"] += header.turns

    def _decide_end(self, header: TrajectoryHeader) -> None:
        if counts(header):
            self._ends.wait(header)
        elif header.stop.is_aborted:
            self._ends.over(header, Fate.STALE if header.stop is StopReason.STALE else Fate.CANCELLED)
        else:
            self._ends.over(header, Fate.FAILED)
            self._counts["failures"] += 1
            if self._counts["failures"] > self._failure_budget:
                raise TooManyFailures(
                    f"{self._counts['failures']} trajectories failed before the batch of step "
                    f"{self.next_step} was complete; the last, of domain {header.domain!r}: {header.stop}, "
                    f"{header.error or header.outcome}. Mend the domain's environment or reward, "
                    "or raise environment.failure_budget"
                )


def manifest_of(batch: Batch, epoch: int) -> BatchManifest:
    """What is committed of a batch by the trainer of this lease epoch."""
    return BatchManifest(
        step=batch.step,
        epoch=epoch,
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
        counts={**batch.counts, **end_counts(batch.ends)},
    )


def reward_of(header: TrajectoryHeader) -> float:
    """The reward of a trajectory that counts. Raises TypeError for one that has none."""
    if not isinstance(header.outcome, Reward):
        raise TypeError(f"trajectory {header.key} has no reward: {header.outcome}")
    return header.outcome.value


def derived_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
