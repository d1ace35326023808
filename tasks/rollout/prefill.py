"""Which turns are prefilled by another worker than the one that decodes them. Pure.

The worker that decodes keeps a trajectory's KV from turn to turn, so what a turn adds is its tail: the tokens
that the environment answered with. A short tail is cheaper to compute there than to hand over.

A prefill worker keeps what it computed of a trajectory as well. Of a next turn it computes what came since,
which is no more than the decoding worker would; without that cache it would compute the whole context every
time. So a trajectory stays with its prefill worker while that one is there.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Kept:
    decoder: object
    version: int
    tokens: int  # first ones of the context


class PrefillPlan:
    """Knows what decoding workers keep from the turns it is told of.

    A worker may have evicted what it is believed to keep: it then computes that itself.
    """

    def __init__(self, min_prefill_tokens: int):
        """A turn with fewer uncached tokens is prefilled where it is decoded."""
        self._min_tokens = min_prefill_tokens
        self._kept: dict[str, _Kept] = {}
        self._prefillers: dict[str, str] = {}

    def uncached(self, trajectory: str, context: int, version: int) -> int:
        """Tokens, of a context of so many, that its worker lacks KV of, under the weights of this version.

        The last one is not among them: it is computed where it is decoded in any case, for its logits.
        """
        kept = self._kept.get(trajectory)
        known = kept.tokens if kept is not None and kept.version == version else 0
        return max(0, context - 1 - known)

    def is_worthwhile(self, trajectory: str, context: int, version: int) -> bool:
        """Whether a turn with this context should go through a prefill worker."""
        return self.uncached(trajectory, context, version) >= self._min_tokens

    def decoder(self, trajectory: str) -> object | None:
        """Who keeps the trajectory's KV, as `decoded` was told."""
        kept = self._kept.get(trajectory)
        return None if kept is None else kept.decoder

    def decoded(self, trajectory: str, decoder: object, tokens: int, version: int) -> None:
        """A turn ended here with a context of so many tokens: the KV of all but the last is kept."""
        self._kept[trajectory] = _Kept(decoder, version, max(0, tokens - 1))

    def lost(self, trajectory: str) -> None:
        """Who kept the trajectory's KV is gone."""
        self._kept.pop(trajectory, None)

    def prefiller(self, trajectory: str) -> str | None:
        """The prefill worker that computed the trajectory's turns before."""
        return self._prefillers.get(trajectory)

    def prefilled(self, trajectory: str, prefiller: str) -> None:
        self._prefillers[trajectory] = prefiller

    def finish(self, trajectories: Iterable[str]) -> dict[str, list[str]]:
        """These trajectories are over. Returns, by prefill worker, those whose KV it may forget."""
        over: dict[str, list[str]] = {}
        for trajectory in trajectories:
            self._kept.pop(trajectory, None)
            prefiller = self._prefillers.pop(trajectory, None)
            if prefiller is not None:
                over.setdefault(prefiller, []).append(trajectory)
        return over
