"""Whose KV fills an engine's blocks, as vLLM's block pool with prefix caching decides it. Pure.

Blocks are counted, not named. What a turn leaves behind is one extent of its session, and of the prompt that
its group shares another one, as soon as no running turn uses it. Extents are given up from the least recently
used on, each from its end on: vLLM frees a request's blocks last one first, into a queue that it reuses in
order. One difference: blocks that hold nothing are used before any extent is given up, where vLLM reuses
the never-filled last block of an ended request in its place of the queue.
"""

from collections import OrderedDict
from dataclasses import dataclass

from tasks.rollout.engines.modelled.turns import Prompt, Turn


@dataclass(eq=False, slots=True)
class _Kept:
    """What an idle session keeps: blocks `first : first + blocks` of its context."""

    session: str
    first: int  # blocks before it are of a shared prompt
    blocks: int  # 0 where all that it had is the prompt's
    prompt_key: str | None


class KvCache:
    """A turn's later contexts are taken to begin with its earlier ones and what it sampled."""

    def __init__(self, blocks: int, block_tokens: int, prefix_cache: bool):
        self.blocks = blocks
        self._block_tokens = block_tokens
        self._prefix_cache = prefix_cache
        self._empty = blocks
        self._kept_blocks = 0  # of extents that no running turn uses
        self._least_recent: OrderedDict[_Kept | Prompt, None] = OrderedDict()
        self._sessions: dict[str, _Kept] = {}
        self._prompts: dict[str, Prompt] = {}

    @property
    def available(self) -> int:
        """Blocks that running turns can be given."""
        return self._empty + self._kept_blocks

    @property
    def kept_sessions(self) -> int:
        return len(self._sessions)

    def claim(self, count: int) -> None:
        """Give out blocks, at most `available`; extents are evicted for them where need be."""
        lacking = count - self._empty
        if lacking > 0:
            self._evict(lacking)
        self._empty -= count

    def kept(self, session: str) -> int:
        """Blocks of an idle session's context that a next turn would find."""
        kept = self._sessions.get(session)
        if kept is None:
            return 0
        prompt = self._prompts.get(kept.prompt_key) if kept.prompt_key is not None else None
        shared = prompt.blocks if prompt is not None else 0
        return kept.first + kept.blocks if kept.first <= shared else shared

    def forget(self, session: str) -> None:
        """The session is over. Blocks stay until they are needed, as vLLM knows no sessions."""
        kept = self._sessions.get(session)
        if kept is not None and not kept.blocks:
            del self._sessions[session]

    def hit(self, turn: Turn) -> tuple[int, int]:
        """Blocks of the turn's context that it would find; of these, the ones no running turn uses.

        The last token is computed even if it is cached: its logits are needed.
        """
        most = (turn.length - 1) // self._block_tokens
        prompt = self._prompts.get(turn.prompt_key) if turn.prompt_key is not None else None
        shared = min(prompt.blocks, most) if prompt is not None else 0
        idle = prompt.blocks if prompt is not None and not prompt.users else 0
        kept = self._sessions.get(turn.session)
        if kept is None or kept.first > shared:
            return shared, idle
        own = min(kept.blocks, max(0, most - kept.first))
        return (kept.first + own, idle + own) if own else (shared, idle)

    def take(self, turn: Turn) -> int:
        """The turn runs: it holds the blocks that `hit` found. Returns their number."""
        found, _ = self.hit(turn)
        if turn.prompt_key is not None and self._prefix_cache:
            prompt = self._prompts.get(turn.prompt_key)
            if prompt is None:
                whole = min(turn.prompt_tokens, turn.context) // self._block_tokens
                prompt = self._prompts[turn.prompt_key] = Prompt(turn.prompt_key, whole)
            if not prompt.users and prompt.blocks:
                del self._least_recent[prompt]
                self._kept_blocks -= prompt.blocks
            prompt.users += 1
            turn.prompt = prompt
        kept = self._sessions.pop(turn.session, None)
        turn.first_own = turn.held = found
        if kept is not None and kept.blocks:
            del self._least_recent[kept]
            self._kept_blocks -= kept.blocks
            shared = turn.prompt.blocks if turn.prompt is not None else 0
            reused = max(0, found - kept.first) if kept.first <= shared else 0
            reused = min(reused, kept.blocks)
            self._empty += kept.blocks - reused
            if reused:
                turn.first_own = kept.first
        turn.extends_prompt = False
        return found

    def grow(self, turn: Turn, held: int) -> None:
        """The turn holds so many blocks from now on; `available` must be enough."""
        new = held - turn.held
        if new <= 0:
            return
        self.claim(new)
        prompt = turn.prompt
        if prompt is not None and turn.held == turn.first_own == prompt.blocks:
            extended = min(new, prompt.whole - prompt.blocks)
            if extended > 0:
                prompt.blocks += extended
                turn.first_own += extended
                turn.extends_prompt = True
        turn.held = held

    def release(self, turn: Turn, computed: int, keep: bool = True) -> None:
        """The turn runs no longer; KV of its first `computed` tokens may be found by later ones."""
        keep = keep and self._prefix_cache
        full = computed // self._block_tokens
        own = max(0, min(full, turn.held) - turn.first_own) if keep else 0
        self._empty += turn.held - turn.first_own - own
        prompt, turn.prompt = turn.prompt, None
        if own or (keep and prompt is not None):
            first = turn.first_own if own else min(full, turn.first_own)
            kept = _Kept(turn.session, first, own, turn.prompt_key)
            self._sessions[turn.session] = kept
            if own:
                self._least_recent[kept] = None
                self._kept_blocks += own
        turn.held = turn.first_own = 0
        if prompt is None:
            return
        if turn.extends_prompt and full < prompt.blocks:
            self._empty += prompt.blocks - full
            prompt.blocks = full
        prompt.users -= 1
        if prompt.users:
            return
        if keep and prompt.blocks:
            self._least_recent[prompt] = None
            self._kept_blocks += prompt.blocks
        else:
            self._empty += prompt.blocks
            del self._prompts[prompt.key]

    def forget_all(self) -> None:
        """Nothing that is kept holds any more; no turn runs."""
        self._empty += self._kept_blocks
        self._kept_blocks = 0
        self._least_recent.clear()
        self._sessions.clear()
        self._prompts.clear()

    def _evict(self, count: int) -> None:
        self._kept_blocks -= count
        self._empty += count
        while count:
            extent = next(iter(self._least_recent))
            given = min(count, extent.blocks)
            extent.blocks -= given
            count -= given
            if extent.blocks:
                return
            del self._least_recent[extent]
            if isinstance(extent, Prompt):
                del self._prompts[extent.key]
            else:
                del self._sessions[extent.session]
