"""The turns that decode, whose contexts all grow by one token an iteration. Pure.

An iteration changes nothing but the tick: a turn's length is the tick plus its offset, so which turn ends
first, and when blocks are needed, is known without going through the turns.
"""

import heapq
from collections.abc import Iterator

from tasks.rollout.engines.modelled.turns import Turn


class Decodes:
    """A decode at a tick reads `length - 1` computed tokens, computes one more and samples another.

    It needs a new KV block where the tokens computed so far fill whole blocks.
    """

    def __init__(self, block_tokens: int):
        self.count = 0
        self.tick = 0
        self._block = block_tokens
        self._computed = 0  # sum over turns of computed tokens, each minus the tick
        self._phases = [0] * block_tokens  # turns by (computed tokens minus tick) % block
        self._ends: list[tuple[int, int, Turn]] = []  # heap of (tick, order); turns that left are still there

    @property
    def context(self) -> int:
        """Sum of the computed tokens."""
        return self._computed + self.count * self.tick

    def add(self, turn: Turn) -> None:
        """From the next tick on; `length` and `sampled` count the token that was just sampled."""
        turn.decoding = True
        turn.offset = turn.length - self.tick
        turn.ends_at = self.tick + turn.to_sample - turn.sampled
        self.count += 1
        self._computed += turn.offset - 1
        self._phases[(turn.offset - 1) % self._block] += 1
        heapq.heappush(self._ends, (turn.ends_at, turn.order, turn))

    def remove(self, turn: Turn) -> None:
        """Sets its `length`, `sampled` and `computed` to what they are at this tick."""
        turn.decoding = False
        turn.length = self.tick + turn.offset
        turn.sampled = turn.to_sample - (turn.ends_at - self.tick)
        turn.computed = turn.length - 1
        self.count -= 1
        self._computed -= turn.offset - 1
        self._phases[(turn.offset - 1) % self._block] -= 1

    def computed(self, turn: Turn) -> int:
        return self.tick + turn.offset - 1

    def first_end(self) -> int:
        """Tick after the last token of the turn that ends first; there must be one."""
        while True:
            tick, order, turn = self._ends[0]
            if turn.decoding and turn.order == order:
                return tick
            heapq.heappop(self._ends)

    def ended(self) -> Iterator[Turn]:
        """Those that have sampled all their tokens, in the order of their admission."""
        while self._ends and self._ends[0][0] <= self.tick:
            _, order, turn = heapq.heappop(self._ends)
            if turn.decoding and turn.order == order:
                yield turn

    def needs_block(self, turn: Turn) -> bool:
        """Whether the turn begins a block at this tick."""
        return not (self.tick + turn.offset - 1) % self._block

    def needed_now(self) -> int:
        """Blocks begun at this tick."""
        return self._phases[-self.tick % self._block]

    def needed(self, ticks: range) -> int:
        """Blocks begun at these ticks, from `tick` on."""
        cycles, rest = divmod(len(ticks), self._block)
        return cycles * self.count + sum(self._phases[-tick % self._block] for tick in ticks[:rest])

    def alike(self, available: int) -> int:
        """Iterations until a turn ends or blocks run out. What the first one needs is not counted."""
        most = self.first_end() - self.tick
        if ((most - 1) // self._block + 1) * self.count <= available:
            return most
        cycles, left = divmod(available, self.count)
        for fit in range(1 + cycles * self._block, most):
            left -= self._phases[-(self.tick + fit) % self._block]
            if left < 0:
                return fit
        return most
