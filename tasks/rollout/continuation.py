"""What is kept of a turn in flight, so that one lost with its worker goes on elsewhere. Pure.

Engines report what a running turn has sampled in increments. When the worker is lost, the next one is asked
to go on after the tokens kept: draws are by their index in the turn, so what a seed draws stays the same.
"""

from typing import Any

_ITEM_BYTES = 4  # of a token, a log-probability and a version on the wire: i4, f4, i4


class PartialTurn:
    """One turn of `max_new_tokens` at most after the context `tokens` (little-endian i4), as requested.

    An increment says where it starts among the tokens that the present worker has sampled of the turn. One
    that leaves a gap, repeats, or comes from a worker the turn has left, is not taken: fewer tokens are kept.
    """

    __slots__ = (
        "_context",
        "_logprobs",
        "_max_new_tokens",
        "_request",
        "_tokens",
        "_versions",
        "_worker",
        "_worker_began",
    )

    def __init__(self, session: str, tokens: bytes, max_new_tokens: int, temperature: float, seed: int):
        self._request = {"session": session, "temperature": temperature, "seed": seed}
        self._context = tokens
        self._max_new_tokens = max_new_tokens
        self._tokens = b""
        self._logprobs = b""
        self._versions = b""
        self._worker: object = None
        self._worker_began = 0  # tokens that were kept when the present worker was asked

    @property
    def context(self) -> bytes:
        """As requested."""
        return self._context

    def length(self, answer: dict[str, Any]) -> int:
        """Tokens of the context with those of the whole turn."""
        return (len(self._context) + len(answer["tokens"])) // _ITEM_BYTES

    @property
    def kept(self) -> int:
        """Tokens sampled by workers that were asked, as far as they have been reported."""
        return len(self._tokens) // _ITEM_BYTES

    def ask(self, worker: object) -> dict[str, Any]:
        """The request for the turn's rest, which `worker` is now asked for."""
        self._worker, self._worker_began = worker, self.kept
        request = {
            **self._request,
            "tokens": self._context + self._tokens if self._tokens else self._context,
            "max_new_tokens": self._max_new_tokens - self.kept,
        }
        if self._tokens:
            request["sampled_before"] = self.kept
        return request

    def take(self, worker: object, start: int, tokens: bytes, logprobs: bytes, versions: bytes) -> None:
        """`worker` reports what it has sampled from its token `start` on."""
        count = len(tokens) // _ITEM_BYTES
        if worker is not self._worker or start != self.kept - self._worker_began:
            return
        # An engine reports only turns that still run, so a token is always left to sample.
        if self.kept + count >= self._max_new_tokens or not len(tokens) == len(logprobs) == len(versions):
            return
        self._tokens += tokens
        self._logprobs += logprobs
        self._versions += versions

    def joined(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The whole turn: what earlier workers sampled, and then the present one's answer."""
        if not self._worker_began:
            return answer
        before = self._worker_began * _ITEM_BYTES
        return {
            **answer,
            "tokens": self._tokens[:before] + answer["tokens"],
            "logprobs": self._logprobs[:before] + answer["logprobs"],
            "versions": self._versions[:before] + answer["versions"],
        }
