"""A whole run on its real pure machines, under a random schedule of events, checked after every batch.

What is real: ledger, groups, admission, batching, turn gate, router, turn rounds, manifests' history. What is
drawn: when each turn begins and ends, which fault strikes whom, how long messages are under way, when the
trainer is done, when engines acknowledge a version, when the run is killed.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

from tasks.rollout.lockstep import Moves, TurnRounds
from tasks.rollout.routing import Router
from tasks.rollout.turn_gate import TurnGate, TurnRefused
from tasks.train.batching import DomainQuota
from tasks.train.config import TrainConfig
from tasks.train.ends import Fate
from tasks.train.ledger import Batch, Instruction, Ledger, Start, manifest_of
from tasks.train.manifests import BatchManifest, ManifestHistory
from tasks.train.modes import MODES
from tasks.train.staleness import staleness
from tasks.trajectory import InfraError, MemberSpec, Outcome, Reward, Skip, StopReason, TrajectoryHeader

FAULTS = (StopReason.ENVIRONMENT_ERROR, StopReason.ENVIRONMENT_TIMEOUT, StopReason.GENERATION_ERROR)


class BoundBroken(AssertionError):
    """A batch holds a token older than alpha versions."""


@dataclass(frozen=True, slots=True)
class Troubles:
    """Chances in a thousand, of an event, unless said otherwise."""

    faults: int = 20
    hangs: int = 50  # of an episode
    worker_deaths: int = 5
    deadlines: int = 2
    duplicates: int = 50  # of an announcement
    kills: int = 1
    wire_delay: int = 500  # that a message stays under way though its turn has come


@dataclass(slots=True)
class Episode:
    spec: MemberSpec
    name: str
    turns_wanted: int
    hangs: bool
    phase: str = "asks"  # asks, waits (for its round), generates, answered (its round is not), scores
    turns: int = 0
    versions: list[int] = field(default_factory=list)  # of its sampled tokens
    place: int = 0  # in the list of running episodes


class Schedule:
    """One run. `play` performs random events, `finish` plays without further trouble to the last step."""

    def __init__(
        self,
        train: TrainConfig,
        weights: dict[str, float],
        attempts: int,
        troubles: Troubles,
        seed: int,
        checkpoint_every: int = 1,
    ):
        self.train, self.weights, self.attempts = train, weights, attempts
        self.troubles = troubles
        self.checkpoint_every = checkpoint_every
        self.mode = MODES[train.mode]
        self.draw = random.Random(seed)
        self.events = 0
        self.batches = 0
        self.kills = 0
        self.trained_tokens = 0
        self.greatest_staleness = 0
        self.reasons: Counter[str] = Counter()
        self.history = ManifestHistory()
        self.buffer: dict[tuple[str, int], TrajectoryHeader] = {}  # by name and initiating version
        self.truth: dict[tuple[str, int], list[int]] = {}  # versions of the tokens that lie there
        self.quota = DomainQuota(weights, train.groups)
        self.checkpoint = 0
        self.finishing = False
        self._late: list[TrajectoryHeader] = []  # announcements that a killed run left under way
        self._begin_run()

    # -- a run's beginning: the first, or after a kill -------------------------------------------------------

    def _begin_run(self) -> None:
        self.ledger = Ledger(
            weights=self.weights,
            train=self.train,
            seed=1,
            temperature=1.0,
            attempts=self.attempts,
            failure_budget=10**9,
        )
        self.gate, self.router, self.rounds = TurnGate(), Router(), TurnRounds()
        self.step = self.trained_version = self.served_version = self.checkpoint
        self.replay = {batch.step: batch for batch in self.history.manifests if batch.step >= self.step}
        self.workers = {f"engine-{index}": self.served_version for index in range(3)}
        self.dead: set[str] = set()
        for worker in self.workers:
            self.router.add_worker(worker)
        self.stage = "batch"
        self.batch: BatchManifest | None = None  # taken, to be trained next
        self.training: BatchManifest | None = None
        self.acknowledged: set[str] = set()
        self.suspended = False
        self.running: list[Episode] = []
        self.by_name: dict[str, Episode] = {}
        self.aborts: list[tuple[str, StopReason]] = []  # on their way to the proxy and the episodes
        self.announced: list[TrajectoryHeader] = list(self._late)
        self._late.clear()
        self.begun: set[str] = set()  # names whose end the ledger has not heard of
        self.undecided: dict[str, int] = {}  # sampled tokens of what ended and has no fate yet
        self.due: set[str] = set()  # those of groups no batch can hold: the next batch says their fate
        self.group_begun: dict[int, int] = {}  # under which version
        self.sampled = self.trained = self.wasted = 0  # tokens, as batches account for them
        next_step = self.history.next_step
        waiting = self.history.unconsumed((name, version) for name, version in self.buffer)
        committed = [self.buffer[name, version] for name, version in waiting]
        finished = {entry.group for batch in self.history.manifests for entry in batch.trajectories}
        for header in committed:
            if header.key.group not in finished:
                self.undecided[str(header.key)] = header.sampled_tokens
                self.sampled += header.sampled_tokens
                self._note_begun(header.key.group, min(header.initiating_version, header.oldest_version))
        self.delivered = self.sampled
        self.ledger.restore(
            version=self.checkpoint,
            next_step=self.checkpoint if next_step is None else next_step,
            trained={(e.group, e.domain) for batch in self.history.manifests for e in batch.trajectories},
            retired=self.history.retired_groups,
            committed=committed,
        )
        self.gate.set_oldest_admissible(self.ledger.oldest_admissible_version)
        self._perform(self.ledger.begin())

    def _note_begun(self, group: int, version: int) -> None:
        self.group_begun[group] = min(version, self.group_begun.get(group, version))

    def _kill(self) -> bool:
        """Nothing survives but the stores, and at times an announcement that comes too late."""
        self.kills += 1
        if self.announced and self.draw.random() < 0.3:
            self._late.append(self.draw.choice(self.announced))
        self._begin_run()
        return True

    # -- what the ledger says --------------------------------------------------------------------------------

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Start):
                self._start(instruction.member)
            else:
                if not self.mode.bounds_staleness:
                    assert instruction.reason is not StopReason.STALE, "aborted for its age"
                self.aborts.append((str(instruction.key), instruction.reason))

    def _start(self, spec: MemberSpec) -> None:
        name, draw = str(spec.key), self.draw.random
        assert name not in self.by_name, f"{name} is started while it runs"
        assert spec.initiating_version == self.ledger.version
        self._note_begun(spec.key.group, spec.initiating_version)
        self.begun.add(name)
        hangs = not self.finishing and draw() * 1000 < self.troubles.hangs
        episode = Episode(spec, name, 1 + int(draw() * draw() * 8), hangs, place=len(self.running))
        self.by_name[name] = episode
        self.running.append(episode)
        if self.mode.lockstep:
            self.rounds.expect([name])

    # -- episodes --------------------------------------------------------------------------------------------

    def _any_episode(self) -> Episode | None:
        running = self.running
        return running[int(self.draw.random() * len(running))] if running else None

    def _move(self, episode: Episode | None) -> bool:
        """The next thing that happens to an episode, if it can happen now."""
        if episode is None or (episode.hangs and episode.phase == "asks" and episode.turns):
            return False
        match episode.phase:
            case "asks":
                return self._ask(episode)
            case "generates":
                return self._generate(episode)
            case "scores":
                return self._score(episode)
        return False

    def _ask(self, episode: Episode) -> bool:
        if self.suspended:
            return False
        if self.mode.lockstep:
            episode.phase = "waits"
            self._let(self.rounds.ask(episode.name))
            return True
        self._route(episode)
        return True

    def _route(self, episode: Episode) -> None:
        spec = episode.spec
        try:
            self.gate.check(episode.name, spec.initiating_version)
        except TurnRefused as refusal:
            self._end(episode, refusal.reason, Skip("refused"))
            return
        worker = self.router.route(episode.name, spec.domain)
        assert worker not in self.dead
        episode.phase = "generates"

    def _let(self, moves: Moves) -> None:
        for name in moves.begin:
            episode = self.by_name.get(name)
            if episode is not None and episode.phase == "waits":
                self._route(episode)
        for name in moves.release:
            episode = self.by_name.get(name)
            if episode is not None and episode.phase == "answered":
                self._turn_over(episode)

    def _generate(self, episode: Episode) -> bool:
        if self.suspended:
            return False
        worker = self.router.route(episode.name, episode.spec.domain)  # elsewhere, if its worker died
        chance = self.draw.random()
        if chance < 0.6:
            count = 1 + int(chance * 5)
            episode.versions += [self.workers[worker]] * count
            return True
        if not episode.versions:
            episode.versions.append(self.workers[worker])
        if self.mode.lockstep:
            episode.phase = "answered"
            self._let(self.rounds.answered(episode.name))
        else:
            self._turn_over(episode)
        return True

    def _turn_over(self, episode: Episode) -> None:
        episode.turns += 1
        episode.phase = "scores" if episode.turns >= episode.turns_wanted else "asks"
        if episode.phase == "scores" and self.mode.lockstep:
            self._let(self.rounds.over([episode.name]))

    def _score(self, episode: Episode) -> bool:
        if self.mode.lockstep and self.rounds.live:
            return False
        chance = self.draw.random()
        if chance < 0.02:
            self._end(episode, StopReason.TERMINATED, InfraError("judge"))
        elif chance < 0.04:
            self._end(episode, StopReason.TERMINATED, Skip("no gold answer"))
        else:
            self._end(episode, StopReason.TERMINATED, Reward(float(chance < 0.5)))
        return True

    def _end(self, episode: Episode, stop: StopReason, outcome: Outcome) -> None:
        last = self.running.pop()
        if last is not episode:
            self.running[episode.place] = last
            last.place = episode.place
        del self.by_name[episode.name]
        self.router.release(episode.name)
        spec, versions = episode.spec, episode.versions
        header = TrajectoryHeader(
            key=spec.key,
            domain=spec.domain,
            stop=stop,
            outcome=outcome,
            initiating_version=spec.initiating_version,
            oldest_version=min(versions, default=spec.initiating_version),
            newest_version=max(versions, default=spec.initiating_version),
            tokens=len(versions) + 5,
            sampled_tokens=len(versions),
            turns=episode.turns,
            generate_seconds=0.0,
            environment_seconds=0.0,
            reward_seconds=0.0,
        )
        if isinstance(outcome, Reward):
            place = (episode.name, spec.initiating_version)
            if place not in self.buffer:
                self.buffer[place], self.truth[place] = header, versions
            header = self.buffer[place]
        self.announced.append(header)
        if self.mode.lockstep:
            self._let(self.rounds.over([episode.name]))
        self.gate.finish([episode.name])

    def _fault(self) -> bool:
        """An error, or the end of a hang."""
        episode = self._any_episode()
        if episode is None or (self.finishing and not episode.hangs):
            return False
        self._end(episode, self.draw.choice(FAULTS), InfraError("fault"))
        return True

    # -- messages --------------------------------------------------------------------------------------------

    def _deliver_abort(self) -> bool:
        if not self.aborts or self._is_delayed():
            return False
        name, reason = self.aborts.pop(int(self.draw.random() * len(self.aborts)))
        episode = self.by_name.get(name)
        if episode is None:
            return True  # it crossed the end on the wire
        self.gate.abort([name], reason)
        if self.mode.lockstep:
            self._let(self.rounds.over([name]))
        if name in self.by_name and self.draw.random() < 0.7:  # otherwise the gate refuses its next turn
            self._end(episode, reason, Skip("aborted"))
        return True

    def _deliver_end(self) -> bool:
        if not self.announced or self._is_delayed():
            return False
        index = int(self.draw.random() * len(self.announced))
        header = self.announced[index]
        if self.draw.random() * 1000 >= self.troubles.duplicates:
            self.announced[index] = self.announced[-1]
            self.announced.pop()
        name = str(header.key)
        if name in self.begun:
            self.begun.discard(name)
            self.undecided[name] = header.sampled_tokens
            self.delivered += header.sampled_tokens
            oldest = min(header.initiating_version, header.oldest_version)
            self._note_begun(header.key.group, oldest)  # late news of a killed run, or an old worker's tokens
        self._perform(self.ledger.member_ended(header))
        return True

    def _is_delayed(self) -> bool:
        return not self.finishing and self.draw.random() * 1000 < self.troubles.wire_delay

    # -- inference workers -----------------------------------------------------------------------------------

    def _worker_dies_or_returns(self) -> bool:
        if self.dead and self.draw.random() < 0.5:
            worker = self.draw.choice(sorted(self.dead))
            self.dead.discard(worker)
            self.acknowledged.discard(worker)
            self.workers[worker] = self.trained_version if self.stage == "begin" else self.served_version
            if self.mode.name in ("tutti", "areal") and self.draw.random() < 0.1:
                self.workers[worker] = max(0, self.served_version - 1)  # as if it were not brought up to date
            self.router.restore(worker)
            return True
        if len(self.dead) == 2:
            return False
        worker = self.draw.choice(sorted(self.workers.keys() - self.dead))
        self.dead.add(worker)
        self.router.set_aside(worker)
        for episode in self.running:
            if episode.phase == "generates" and self.draw.random() < 0.2:
                del episode.versions[int(self.draw.random() * len(episode.versions)) :]  # not all were kept
        return True

    # -- the training loop, as flows/async_train.py orders it ------------------------------------------------

    def _loop(self) -> bool:
        match self.stage:
            case "batch":
                return self._take_batch()
            case "train":
                if self.training is not None:
                    return False
                self.stage, self.suspended, self.acknowledged = "update", True, set()
            case "update":
                waiting = sorted(self.workers.keys() - self.dead - self.acknowledged)
                if waiting:
                    worker = self.draw.choice(waiting)
                    self.workers[worker] = self.trained_version
                    self.acknowledged.add(worker)
                else:
                    self.stage, self.suspended = "begin", False
            case "begin":
                self._resume()
            case "over":
                return False
        return True

    def _take_batch(self) -> bool:
        if self.step >= self.train.steps:
            if self.training is None:
                self.stage = "over"
            return self.training is None
        if self.step in self.replay:
            self.batch = self.replay.pop(self.step)
        else:
            batch, instructions = self.ledger.take_batch()
            self.gate.set_oldest_admissible(self.ledger.oldest_admissible_version)
            self._perform(instructions)
            if batch is None:
                return bool(instructions)
            self._check(batch)
            self.batch = self._commit(batch)
        if not self.mode.overlaps_training:
            self.training, self.batch = self.batch, None
        self.stage = "train"
        return True

    def _resume(self) -> None:
        self.served_version = self.trained_version
        self._perform(self.ledger.version_advanced(self.served_version))
        if self.mode.overlaps_training:
            self.training, self.batch = self.batch, None
        self.step += 1
        self.stage = "batch"

    def _trained(self) -> bool:
        batch = self.training
        if batch is None:
            return False
        assert batch.step == self.trained_version
        for entry in batch.trajectories:
            assert (entry.name, entry.version) in self.buffer, (
                f"{entry.name} was evicted before it was trained"
            )
        self.trained_version += 1
        self.training = None
        if self.trained_version % self.checkpoint_every == 0:
            self.checkpoint = self.trained_version
            self._evict()
        return True

    def _evict(self) -> None:
        """As `Collector.oldest_version_needed` says."""
        versions = self.history.versions_from(self.trained_version)
        oldest = min([self.ledger.oldest_version_needed, *versions])
        for place in [place for place in self.buffer if place[1] < oldest]:
            del self.buffer[place]
            del self.truth[place]

    def _commit(self, batch: Batch) -> BatchManifest:
        manifest = manifest_of(batch, epoch=1)
        self.history.add(manifest)  # raises ConsumedTwice
        return manifest

    # -- what must hold of every batch -----------------------------------------------------------------------

    def _check(self, batch: Batch) -> None:
        self.batches += 1
        assert Counter(group.domain for group in batch.groups) == self.quota.of_batch(batch.step)
        groups = {entry.group for done in self.history.manifests for entry in done.trajectories}
        for group in batch.groups:
            assert group.group not in groups, f"group {group.group} is trained twice"
            assert 1 <= len(group.members) <= self.train.group_size
            for header in group.members:
                self._check_member(batch.step, header)
        self._check_ends(batch)

    def _check_member(self, step: int, header: TrajectoryHeader) -> None:
        assert not header.stop.is_aborted
        assert not header.stop.is_failure
        tokens = self.truth[str(header.key), header.initiating_version]
        assert len(tokens) == header.sampled_tokens
        age = max((staleness(step, version) for version in tokens), default=0)
        self.greatest_staleness = max(self.greatest_staleness, age)
        if age > self.train.alpha and self.mode.bounds_staleness:
            raise BoundBroken(f"step {step}: a token of {header.key} is {age} versions old")
        if self.mode.one_batch_at_a_time:
            assert len(set(tokens)) <= 1, "in flight over an update"
            if step and not self.kills:
                assert age == 1

    def _check_ends(self, batch: Batch) -> None:
        """Every trajectory has one fate, a good one is given up for a reason, and tokens add up."""
        trained = {str(header.key) for group in batch.groups for header in group.members}
        for end in batch.ends:
            name, tokens = str(end.header.key), self.undecided.pop(str(end.header.key))
            assert (end.fate is Fate.TRAINED) == (name in trained)
            trained.discard(name)
            self.reasons[end.fate] += 1
            if end.fate is Fate.TRAINED:
                self.trained += tokens
                self.trained_tokens += tokens
            else:
                self.wasted += tokens
            if end.fate is Fate.STALE and end.header.stop is not StopReason.STALE:
                oldest = self.group_begun[end.header.key.group]
                assert oldest < batch.step + 1 - self.train.alpha, (
                    f"{name} was given up while it was admissible"
                )
        assert not trained
        counts = batch.counts
        wasted = sum(count for key, count in counts.items() if key.startswith("tokens/wasted/"))
        assert wasted == sum(end.header.sampled_tokens for end in batch.ends if end.fate is not Fate.TRAINED)
        self.sampled += counts["tokens/sampled"]
        assert self.sampled == self.delivered
        assert self.trained + self.wasted + sum(self.undecided.values()) == self.sampled
        held = self.ledger.groups_held
        lost = self.due & self.undecided.keys()
        assert not lost, f"ended and lost: {lost}"
        self.due = {name for name in self.undecided if int(name[1:9]) not in held}

    # -- playing ---------------------------------------------------------------------------------------------

    def _event(self) -> bool:
        chance, troubles = self.draw.random() * 1000, self.troubles
        if not self.finishing:
            if chance < troubles.faults:
                return self._fault()
            chance -= troubles.faults
            if chance < troubles.worker_deaths:
                return self._worker_dies_or_returns()
            chance -= troubles.worker_deaths
            if chance < troubles.deadlines:
                return self._deadline()
            chance -= troubles.deadlines
            if chance < troubles.kills and self.draw.random() < 0.3 and self.kills < 6:
                return self._kill()
        chance = self.draw.random()
        if chance < 0.72:
            return self._move(self._any_episode())
        if chance < 0.82:
            return self._deliver_end()
        if chance < 0.88:
            return self._deliver_abort()
        if chance < 0.96:
            return self._loop()
        if chance < 0.99:
            return self._trained()
        return self.finishing and self._fault()

    def _deadline(self) -> bool:
        episode = self._any_episode()
        if episode is None:
            return False
        self._perform(self.ledger.deadline_passed(episode.spec.key.group))
        return True

    def _is_stuck(self) -> bool:
        """Nothing at all can happen any more, time-outs included."""
        if self.aborts or self.announced or self.training is not None or self.stage != "batch":
            return False
        if any(episode.hangs and episode.phase == "asks" for episode in self.running):
            return False
        if any(episode.phase in ("asks", "generates") for episode in self.running):
            return False
        if any(episode.phase == "scores" for episode in self.running) and not self.rounds.live:
            return False
        return not self._loop()

    def play(self, events: int) -> None:
        """Until so many events have happened, or the run is over."""
        target, idle = self.events + events, 0
        while self.events < target and self.stage != "over":
            if self._event():
                self.events += 1
                idle = 0
            else:
                idle += 1
                if idle % 500 == 0:
                    assert not self._is_stuck(), f"deadlock at step {self.step}, stage {self.stage}"
                    assert idle < 1_000_000

    def finish(self, events: int = 1_000_000) -> None:
        """To the last step without further trouble. Nothing then runs or is under way for ever."""
        self.finishing = True
        for worker, version in self.workers.items():
            self.workers[worker] = max(version, self.served_version)
        self.play(events)
        assert self.stage == "over", f"step {self.step} of {self.train.steps} was not reached"
        assert self.trained_version == self.train.steps
        assert len(self.history.manifests) == self.train.steps
