"""vLLM V1's scheduling as a plain loop: every iteration by itself, every KV block with a name.

What `ModelledSchedule` finds in closed form is computed here one token after the other.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from infra.performance.iteration import BatchWork
from tasks.rollout.engines.modelled.limits import EngineLimits


@dataclass(frozen=True)
class Linear:
    """Seconds of an iteration, with coefficients that let no two moments coincide by chance."""

    iteration: float = 0.0101
    decode: float = 0.000213
    context: float = 0.0000307
    token: float = 0.0000911
    attended: float = 0.00000131

    def seconds(self, work: BatchWork) -> float:
        return (
            self.iteration
            + self.decode * work.decodes
            + self.context * work.decode_context
            + self.token * work.prefill_tokens
            + self.attended * work.prefill_attended
        )

    def decode_seconds(self, decodes: int, decode_context: int, iterations: int) -> float:
        grown = decodes * iterations * (iterations - 1) / 2
        fixed = iterations * (self.iteration + self.decode * decodes)
        return fixed + self.context * (iterations * decode_context + grown)

    def decode_iterations(self, decodes: int, decode_context: int, seconds: float) -> int:
        done = 0
        while self.decode_seconds(decodes, decode_context, done + 1) <= seconds:
            done += 1
        return done


@dataclass(eq=False)
class PlainTurn:
    session: str
    context: int
    to_sample: int
    key: str | None
    prompt_tokens: int
    sampled: int = 0
    computed: int = 0
    decoding: bool = False
    stamps: list[int] = field(default_factory=list)
    blocks: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.context + self.sampled


class PlainCache:
    """Blocks by name: ("prompt", key, index) where a group shares it, ("own", session, index) otherwise."""

    def __init__(self, blocks: int, size: int, keeps: bool):
        self.empty, self.size, self.keeps = blocks, size, keeps
        self.idle: OrderedDict[tuple[str, str, int], None] = OrderedDict()  # least recently used first
        self.users: dict[str, set[PlainTurn]] = {}
        self.prompts: dict[str, int] = {}  # blocks of each that are in the cache
        self.computed_by: dict[str, PlainTurn] = {}

    @property
    def available(self) -> int:
        return self.empty + len(self.idle)

    def allocate(self) -> None:
        if not self.empty:
            (kind, name, _), _ = self.idle.popitem(last=False)
            if kind == "prompt":
                self.prompts[name] -= 1
            self.empty += 1
        self.empty -= 1

    def find(self, turn: PlainTurn) -> tuple[list[tuple[str, str, int]], int]:
        found: list[tuple[str, str, int]] = []
        shared = self.prompts.get(turn.key, 0) if turn.key else 0
        most = (turn.length - 1) // self.size
        own = [index for kind, name, index in self.idle if (kind, name) == ("own", turn.session)]
        begins = min(own, default=math.inf)
        for index in range(most):
            if index in own and begins <= shared:
                found.append(("own", turn.session, index))
            elif index < shared and turn.key:
                found.append(("prompt", turn.key, index))
            else:
                break
        pinned = shared if turn.key and not self.users.get(turn.key) else 0
        return found, pinned + sum(kind == "own" for kind, _, _ in found)

    def take(self, turn: PlainTurn) -> None:
        turn.blocks, _ = self.find(turn)
        if turn.key and self.keeps:
            self.prompts.setdefault(turn.key, 0)
            for index in range(self.prompts[turn.key]):
                self.idle.pop(("prompt", turn.key, index), None)
            self.users.setdefault(turn.key, set()).add(turn)
        for block in [b for b in self.idle if b[:2] == ("own", turn.session)]:
            del self.idle[block]
            self.empty += block not in turn.blocks

    def grow(self, turn: PlainTurn, tokens: int) -> None:
        while len(turn.blocks) * self.size < tokens:
            self.allocate()
            index, key = len(turn.blocks), turn.key
            shares = (
                key is not None
                and self.keeps
                and index == self.prompts[key] < turn.prompt_tokens // self.size
                and all(kind == "prompt" for kind, _, _ in turn.blocks)
            )
            if shares and key is not None:
                self.prompts[key] += 1
                self.computed_by[key] = turn
                turn.blocks.append(("prompt", key, index))
            else:
                turn.blocks.append(("own", turn.session, index))

    def release(self, turn: PlainTurn, computed: int, keep: bool = True) -> None:
        full, keep = computed // self.size, keep and self.keeps
        for block in reversed(turn.blocks):
            if block[0] == "own":
                if keep and block[2] < full:
                    self.idle[block] = None
                else:
                    self.empty += 1
        turn.blocks = []
        key = turn.key
        if key is None or not self.keeps:
            return
        self.users[key].discard(turn)
        if self.computed_by.get(key) is turn and self.prompts[key] > full:
            self.empty += self.prompts[key] - full
            self.prompts[key] = full
        if not self.users[key]:
            for index in reversed(range(self.prompts[key])):
                if keep:
                    self.idle[("prompt", key, index)] = None
                else:
                    self.empty += 1
            if not keep:
                self.prompts[key] = 0

    def forget_all(self) -> None:
        self.empty += len(self.idle)
        self.idle.clear()
        self.prompts.clear()


@dataclass
class Outcome:
    ends: list[tuple[str, float, int, str, tuple[int, ...]]]  # session, seconds, tokens, stop, versions
    preempted: list[str]
    recomputed: int
    iterations: int
    peak: int  # blocks in use


def plainly(events: list[tuple[float, str, Any]], limits: EngineLimits, kv_tokens: int) -> Outcome:
    """`events`, in the order of their times: ("submit", turn), ("again", (turn, tokens, to_sample)): the
    turn's session, if it has none now, goes on so many tokens after it; ("abort", session); ("update",
    seconds): generation freezes, and once it has, goes on so much later under the next version's weights.
    """
    timing = Linear()
    cache = PlainCache(kv_tokens // limits.block_tokens, limits.block_tokens, limits.prefix_cache)
    blocks = cache.available
    waiting: list[PlainTurn] = []
    running: list[PlainTurn] = []
    stale: dict[PlainTurn, int] = {}
    queue = list(events)
    outcome = Outcome([], [], 0, 0, 0)
    now, version, ends, frozen = 0.0, 0, math.inf, None
    lengths: dict[str, int] = {}
    plan: dict[PlainTurn, int] = {}

    def end(turn: PlainTurn, stop: str) -> None:
        outcome.ends.append((turn.session, now, turn.sampled, stop, tuple(turn.stamps)))
        lengths[turn.session] = turn.length
        stale.pop(turn, None)

    def preempt(turn: PlainTurn, keep: bool = True) -> None:
        running.remove(turn)
        cache.release(turn, turn.computed, keep)
        turn.computed, turn.decoding = 0, False
        waiting.insert(0, turn)

    def allocate_or_preempt(turn: PlainTurn, tokens: int) -> bool:
        while -(-tokens // cache.size) - len(turn.blocks) > cache.available:
            victim = running[-1]
            outcome.preempted.append(victim.session)
            preempt(victim)
            if victim is turn:
                return False
        cache.grow(turn, tokens)
        return True

    def schedule() -> None:
        plan.clear()
        budget, before = limits.max_batch_tokens, len(outcome.preempted)
        for turn in list(running):
            count = min(turn.length - turn.computed, budget)
            if turn in running and count and allocate_or_preempt(turn, turn.computed + count):
                plan[turn] = count
                budget -= count
        while waiting and budget and len(running) < limits.max_running and len(outcome.preempted) == before:
            turn = waiting[0]
            found, pinned = cache.find(turn)
            start = len(found) * cache.size
            count = min(turn.length - start, budget)
            needed = turn.length if limits.reserve_context else start + count
            if -(-needed // cache.size) - len(found) + pinned > cache.available:
                break
            running.append(waiting.pop(0))
            cache.take(turn)
            turn.computed = start
            cache.grow(turn, start + count)
            plan[turn] = count
            budget -= count

    def complete() -> None:
        nonlocal ends
        ends = math.inf
        for turn, count in list(plan.items()):
            if turn not in running:
                continue
            lost = stale.get(turn, 0)
            outcome.recomputed += max(0, min(turn.computed + count, lost) - turn.computed)
            turn.computed += count
            if turn.computed >= lost:
                stale.pop(turn, None)
            if turn.computed < turn.length:
                continue
            if turn.to_sample:
                turn.sampled += 1
                turn.stamps.append(version)
                turn.decoding = True
            if turn.sampled == turn.to_sample:
                running.remove(turn)
                cache.release(turn, turn.computed)
                end(turn, "stop" if turn.to_sample else "length")
        plan.clear()

    while True:
        upcoming = queue[0][0] if queue else math.inf
        if ends < math.inf and ends <= upcoming:
            now = ends
            complete()
        elif queue:
            now = max(now, upcoming)
            _, kind, what = queue.pop(0)
            if kind == "submit":
                waiting.append(what)
            elif kind == "again":
                before, more, to_sample = what
                context = lengths.pop(before.session, 0) + more
                if context > more and context + to_sample <= limits.max_context:
                    again = PlainTurn(before.session, context, to_sample, before.key, before.prompt_tokens)
                    waiting.append(again)
            elif kind == "abort":
                for turn in [t for t in waiting + running if t.session == what]:
                    if turn in waiting:
                        waiting.remove(turn)
                    else:
                        under_way = 0 if turn.decoding else plan.get(turn, 0)
                        running.remove(turn)
                        cache.release(turn, turn.computed + under_way)
                    end(turn, "cancelled")
            elif kind == "update" and frozen is None:
                frozen = what
            elif kind == "updated":
                for turn in reversed(running[:]):
                    stale[turn] = max(stale.get(turn, 0), turn.computed)
                    preempt(turn, keep=False)
                cache.forget_all()
                version, frozen = version + 1, None
        else:
            return outcome
        if ends == math.inf and isinstance(frozen, float):
            queue.append((now + frozen, "updated", None))
            queue.sort(key=lambda event: event[0])
            frozen = "frozen"
        if ends == math.inf and frozen is None and not (queue and queue[0][0] <= now):
            while running or waiting:
                schedule()
                if plan:
                    break
            if plan:
                chunks = {turn: count for turn, count in plan.items() if not turn.decoding}
                decodes = [turn for turn in plan if turn not in chunks]
                attended = sum(count * (turn.computed + count / 2) for turn, count in chunks.items())
                work = BatchWork(
                    len(decodes),
                    sum(turn.computed for turn in decodes),
                    sum(chunks.values()),
                    attended,
                    len(chunks),
                )
                ends = now + timing.seconds(work)
                outcome.iterations += 1
                outcome.peak = max(outcome.peak, blocks - cache.available)
