"""Turns as the batch schedule has them: what it is given, what it plans, and what comes of it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasks.trajectory import StopReason


@dataclass(eq=False, slots=True)
class Request:
    """One turn to generate. `max_new_tokens` must leave it within the context; see `BatchSchedule.room`."""

    session: str
    tokens: NDArray[np.int32]  # the context, at least one token
    max_new_tokens: int
    temperature: float
    seed: int
    sampled_before: int = 0  # last tokens of the context that the turn sampled before; its draws go on there
    samples: bool = True  # False: it only computes the KV of its context, and `max_new_tokens` is 0
    offered: range = range(0)  # tokens of the context whose KV, of the present weights, came with it
    imported: range = range(0)  # of these, once it runs, the ones to put into its slot
    slot: int = -1  # while running


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens that a running request has sampled; the arrays have equal length."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended, with what it sampled."""

    request: Request
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    stop: StopReason


@dataclass(frozen=True, slots=True)
class Iteration:
    """Compute next: row r is tokens `starts[r] : starts[r] + counts[r]` of the context in `slots[r]`."""

    slots: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    sampled: NDArray[
        np.bool_
    ]  # rows that reach the end of their context, so that their next token is sampled
    sample_index: NDArray[np.int64]  # of each sampled row: how many tokens its request has sampled before
    prefills: bool  # whether some row computes more than the token its request sampled last
    started: list[Request]  # requests that took their slot with this iteration


@dataclass(slots=True)
class Counters:
    prefill_tokens: int = 0  # computed from contexts, recomputed ones included
    recomputed_tokens: int = 0  # computed again because the weights changed under a running request
    decode_tokens: int = 0  # sampled
    cached_tokens: int = 0  # context tokens that a kept cache saved
    imported_tokens: int = 0  # context tokens that KV which came with the request saved
