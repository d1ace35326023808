"""The inference engine protocol: what the LLM proxy asks of every back end."""

from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tasks.trajectory import StopReason


@dataclass(frozen=True, slots=True)
class KvSource:
    """An engine that holds KV of a request's context, and its name for it."""

    url: str
    token: str | None
    key: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn. `tokens` is the whole context so far; an engine reuses what it still has cached of it."""

    session: str  # the trajectory; at most one request of a session at a time
    tokens: NDArray[np.int32]
    max_new_tokens: int
    temperature: float  # 0 takes the most probable token
    seed: int  # with the number of tokens that the turn has sampled so far, determines every draw
    sampled_before: int = 0  # of `tokens`, the last ones: sampled by this turn before it was interrupted
    kv: KvSource | None = None  # what it has is not computed here; what it turns out to lack is


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled. The three arrays have equal length; the end token, if sampled, is among them."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]  # float32, under the distribution sampled from
    versions: NDArray[np.int32]  # the policy version that sampled each token
    stop: StopReason  # STOP, LENGTH, or why it was aborted (CANCELLED, STALE) with the tokens made so far

    @classmethod
    def of_nothing(cls, stop: StopReason) -> "Generation":
        """Of a turn that ended before its first token."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), stop)


@dataclass(frozen=True, slots=True)
class EngineStats:
    version: int
    running: int
    waiting: int
    sessions: int
    suspended: bool
    prefill_tokens: int  # since the engine started; includes recomputed ones
    recomputed_tokens: int
    decode_tokens: int
    cached_tokens: int  # context tokens that a kept KV cache saved from prefill
    steps: int
    busy_seconds: float
    kv_exported_tokens: int = 0  # whose KV another engine fetched
    kv_imported_tokens: int = 0  # context tokens that KV fetched from another engine saved from prefill


class InferenceEngine(Protocol):
    """Commands take effect between two engine steps and never wait for running requests."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Cancelling the awaiting task aborts the request."""

    async def abort(self, sessions: list[str], reason: StopReason) -> None:
        """End these sessions' requests, which return what they have with `reason` as their stop."""

    async def end_session(self, session: str) -> None:
        """The trajectory is over: forget its KV cache."""

    async def suspend(self) -> None:
        """Freeze: no token is sampled after this returns, running requests are kept."""

    async def load_weights(self, version: int) -> None:
        """Replace the weights by a published version, whole or not at all, and mark all KV caches stale.

        Only while suspended. Raises on missing, unmatched or corrupt tensors and then keeps the old version.
        """

    async def resume(self) -> None:
        """Go on. Running requests recompute their KV under the present weights before their next token."""

    async def recompute(self) -> int:
        """Wait, after `resume`, until what was running has rebuilt its KV. Returns the tokens recomputed."""

    async def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class HeldKv:
    """KV that an engine keeps until its room is needed, its session ends or the weights change."""

    key: str  # for `KvSource`
    tokens: int  # of the context's first ones
    version: int  # policy version that computed it


@runtime_checkable
class PullingEngine(Protocol):
    """An engine that can take a version's weights out of the store before it is to serve them."""

    async def prefetch(self, version: int) -> None:
        """Pull a published version beside generation, so that `load_weights` only puts it in place.

        Raises as `load_weights` does, and then nothing is kept; a version pulled before is forgotten.
        """


@runtime_checkable
class KvEngine(Protocol):
    """An engine that shares KV: it prefills for others, and gives what it holds."""

    async def prefill(self, session: str, tokens: NDArray[np.int32]) -> HeldKv:
        """Compute and hold the KV of a context but for its last token, whose logits the decoder needs.

        Raises `RpcError` as `generate` does, and of code `prefill_aborted` where `abort` ended it.
        """

    async def export_kv(self, key: str, start: int, count: int) -> dict[str, Any]:
        """What it holds under this key of the tokens from `start` on, at most of `count`: a wire form.

        Raises `RpcError` of code `kv_gone` where there is none.
        """


class HostedEngine(InferenceEngine, Protocol):
    """An engine that the engine service runs: what it takes lasts as long as the context."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def wait_failed(self) -> None:
        """Raises what ended the engine, once something has."""
