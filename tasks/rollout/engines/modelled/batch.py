"""Who runs in the next iteration of a modelled engine, and with which KV blocks: vLLM V1's scheduler. Pure.

As vllm/v1/core/sched/scheduler.py does it: decodes first, then the prefill that has begun, then new requests,
first come, first served; prefill in chunks that share a token budget; preemption of the request admitted last
when blocks run out, and no admission in an iteration that preempts.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from tasks.rollout.engines.modelled.decodes import Decodes
from tasks.rollout.engines.modelled.kv_cache import KvCache
from tasks.rollout.engines.modelled.limits import EngineLimits
from tasks.rollout.engines.modelled.turns import Counters, Turn


class Chunk(NamedTuple):
    """So many tokens of a turn's context to compute, from `start` on."""

    turn: Turn
    start: int
    tokens: int


class Batch:
    """Waiting and running turns. Counts what it caches, imports and preempts in `counters`."""

    def __init__(self, limits: EngineLimits, kv_tokens: int, counters: Counters):
        """Raises ValueError where the KV of one context does not fit `kv_tokens`."""
        blocks = kv_tokens // limits.block_tokens
        if blocks * limits.block_tokens < limits.max_context:
            raise ValueError(
                f"an engine holds KV of {kv_tokens} tokens, a context may have {limits.max_context}: "
                "give the engine more devices or lower the domains' max_tokens"
            )
        self.cache = KvCache(blocks, limits.block_tokens, limits.prefix_cache)
        self.decodes = Decodes(limits.block_tokens)
        self.waiting: OrderedDict[Turn, None] = OrderedDict()
        self.running: dict[Turn, None] = {}
        """In the order of admission."""
        self.shortest_waiting = 0
        """No waiting turn has fewer tokens left to sample; 0 without one."""
        self._waiting_tokens = 0
        self._partial: Turn | None = None  # the running turn whose prefill is not over
        self._limits = limits
        self._counters = counters
        self._admitted = 0

    @property
    def full(self) -> bool:
        return len(self.running) >= self._limits.max_running

    # Coming and going

    def wait(self, turn: Turn) -> None:
        """Behind all others."""
        left = turn.to_sample - turn.sampled
        self.shortest_waiting = min(self.shortest_waiting, left) if self.waiting else left
        self.waiting[turn] = None
        self._waiting_tokens += turn.length

    def leave(self, turn: Turn, under_way: Iterable[Chunk] | None) -> None:
        """The turn neither waits nor runs any more. `under_way`: see `stop`."""
        if turn in self.waiting:
            self._leave_queue(turn)
        else:
            self.stop(turn, under_way)

    def stop(self, turn: Turn, under_way: Iterable[Chunk] | None = None, keep: bool = True) -> int:
        """It runs no more, and its KV may be found again with `keep`. Returns the tokens whose KV it had.

        `under_way` are the chunks of an iteration under way, None between two.
        """
        del self.running[turn]
        if turn is self._partial:
            self._partial = None
        in_cache = turn.computed
        if turn.decoding:
            self.decodes.remove(turn)
            in_cache = turn.computed
            turn.held = self._blocks(in_cache if under_way is None else in_cache + 1)
        elif under_way is not None:
            # What is under way is computed to its end, so blocks that others share will be whole.
            in_cache = next((start + count for of, start, count in under_way if of is turn), in_cache)
        self.cache.release(turn, in_cache, keep)
        turn.order = -1
        return turn.computed

    def preempt(self, turn: Turn, keep: bool = True) -> int:
        """It waits again, before all others. Between iterations. Returns the tokens whose KV it had."""
        computed = self.stop(turn, keep=keep)
        turn.computed = 0
        self.wait(turn)
        self.waiting.move_to_end(turn, last=False)
        return computed

    def computed_to(self, turn: Turn, computed: int) -> bool:
        """A chunk of a running turn is done. Whether its context is."""
        turn.computed = computed
        if computed < turn.length:
            return False
        if turn is self._partial:
            self._partial = None
        return True

    # Iterations

    def form(self) -> tuple[list[Chunk], bool]:
        """The chunks of the next iteration, beside all decodes; and whether somebody was preempted for it."""
        preempted = not self._claim_decodes()
        chunks: list[Chunk] = []
        budget = self._limits.max_batch_tokens - self.decodes.count
        if self._partial is not None and budget:
            budget -= self._continue_prefill(self._partial, budget, chunks)
            preempted = preempted or not chunks
        if not preempted:
            self._admit(budget, chunks)
        return chunks, preempted

    def claim_ahead(self, iterations: int) -> None:
        """Blocks for the decodes in so many iterations after the one that is under way."""
        ahead = self.decodes.tick + 1
        self.cache.claim(self.decodes.needed(range(ahead, ahead + iterations)))

    def surely_fits(self, chunks: Iterable[Chunk], iterations: int) -> bool:
        """Whether blocks are enough for all that runs and waits, and so many tokens more for each."""
        turns, tokens = self.decodes.count + len(self.waiting), self._waiting_tokens
        for turn, _, _ in chunks:
            turns += 1
            tokens += turn.length
        block = self._limits.block_tokens
        return turns * (iterations // block + 2) + tokens // block <= self.cache.available

    def _claim_decodes(self) -> bool:
        """Blocks for the next iteration's decodes; False where turns had to be preempted for them."""
        needed = self.decodes.needed_now()
        if needed <= self.cache.available:
            self.cache.claim(needed)
            return True
        for turn in list(self.running):
            if turn not in self.running:
                break
            if not turn.decoding or not self.decodes.needs_block(turn):
                continue
            while not self.cache.available:
                last = next(reversed(self.running))
                self.preempt(last)
                self._counters.preemptions += 1
                if last is turn:
                    break
            else:
                self.cache.claim(1)
        return False

    def _continue_prefill(self, turn: Turn, budget: int, chunks: list[Chunk]) -> int:
        count = min(turn.length - turn.computed, budget)
        held = self._blocks(turn.computed + count)
        if held - turn.held > self.cache.available:
            self.preempt(turn)
            self._counters.preemptions += 1
            return 0
        self.cache.grow(turn, held)
        chunks.append(Chunk(turn, turn.computed, count))
        return count

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        cache, block = self.cache, self._limits.block_tokens
        while self.waiting and budget and not self.full:
            turn = next(iter(self.waiting))
            found, idle = cache.hit(turn)
            cached = computed = found * block
            if turn.offered.start <= cached < turn.offered.stop:
                computed = min(turn.offered.stop, turn.length - 1)
            count = min(turn.length - computed, budget)
            must_fit = turn.length if self._limits.reserve_context else computed + count
            if self._blocks(must_fit) - found + idle > cache.available:
                return
            self._leave_queue(turn)
            cache.take(turn)
            cache.grow(turn, self._blocks(computed + count))
            self._counters.cached_tokens += cached
            self._counters.imported_tokens += computed - cached
            turn.computed = computed
            turn.order = self._admitted
            self._admitted += 1
            self.running[turn] = None
            chunks.append(Chunk(turn, computed, count))
            budget -= count
            if computed + count < turn.length:
                self._partial = turn

    def _leave_queue(self, turn: Turn) -> None:
        del self.waiting[turn]
        self._waiting_tokens -= turn.length
        if not self.waiting:
            self.shortest_waiting = 0

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_tokens)
