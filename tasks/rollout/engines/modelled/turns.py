"""Turns as the modelled schedule has them: lengths instead of tokens."""

from dataclasses import dataclass, field

from tasks.trajectory import StopReason


@dataclass(eq=False, slots=True)
class Prompt:
    """The KV blocks of a prompt that members of a group share."""

    key: str
    whole: int  # blocks that the prompt fills
    blocks: int = 0  # of these, the first ones, that are in the cache
    users: int = 0  # running turns that hold them


@dataclass(eq=False, slots=True)
class Turn:
    """One turn. What is under "state" belongs to the schedule."""

    session: str
    context: int  # tokens, at least one
    to_sample: int  # 0 for a prefill, which only computes the KV of its context
    stops: bool = True  # whether the last token is the end token; otherwise the turn is cut there
    prompt_key: str | None = None
    prompt_tokens: int = 0  # first ones of the context, the same in every turn with this key
    offered: range = range(0)  # tokens of the context whose KV, of the present weights, came with it

    # State
    length: int = field(init=False)  # context and sampled tokens; as it was when a decode began
    first_at: float = 0.0  # seconds, once it has sampled a token
    sampled: int = 0  # as it was when a decode began
    computed: int = 0  # tokens whose KV is in the cache; as it was when a decode began
    stale: int = 0  # tokens that were computed before the weights changed
    order: int = -1  # of its admission; the last admitted is preempted first
    decoding: bool = False
    offset: int = 0  # while decoding: length minus the schedule's tick
    ends_at: int = 0  # while decoding: tick after its last token
    versions: list[tuple[int, int]] = field(default_factory=list)  # (version, tokens it sampled), in order
    versioned: int = 0  # sampled tokens that `versions` counts
    held: int = 0  # KV blocks, shared ones included
    first_own: int = 0  # of these, the first that no other turn shares
    prompt: Prompt | None = None
    extends_prompt: bool = False  # it computed shared blocks itself

    def __post_init__(self) -> None:
        self.length = self.context


@dataclass(frozen=True, slots=True)
class Ended:
    """A turn that ended `at` seconds. `turn.versions` counts its tokens by the version that sampled them."""

    turn: Turn
    at: float
    sampled: int
    stop: StopReason


@dataclass(slots=True)
class Counters:
    prefill_tokens: int = 0  # computed from contexts, recomputed ones included
    recomputed_tokens: int = 0  # computed again because the weights changed under a running request
    decode_tokens: int = 0  # sampled
    cached_tokens: int = 0  # context tokens that a kept cache saved
    imported_tokens: int = 0  # context tokens that KV which came with the request saved
    preemptions: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
