"""What running turns have sampled so far, told to whoever asked: see tasks/rollout/continuation.py."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from infra.clock import now
from infra.rpc import RpcConnection, RpcError
from tasks.rollout.engines.batch_schedule import Sampled

logger = logging.getLogger(__name__)


@runtime_checkable
class ProgressEngine(Protocol):
    """An engine that tells what its running requests have sampled."""

    async def progress(self, since: Mapping[str, int]) -> dict[str, Sampled]:
        """What each session's running request has sampled after its first `since[session]` tokens.

        Sessions without one may be left out. A token that ends its request is never among these.
        """


@runtime_checkable
class CheckedEngine(Protocol):
    """An engine with a server of its own behind it, which may be frozen while the engine's process is not."""

    async def check(self) -> None:
        """Return once that server has answered."""


@dataclass(eq=False, slots=True)
class _Turn:
    connection: RpcConnection
    began: float
    told: int = 0


class ProgressReports:
    """Notice `sampled` {session, start, tokens, logprobs, versions}: little-endian i4, f4, i4, from the
    request's token `start` on; every `every_s` seconds, of requests that have run for longer than that."""

    def __init__(self, engine: ProgressEngine, every_s: float):
        self._engine = engine
        self._every_s = every_s
        self._turns: dict[str, _Turn] = {}

    @contextlib.contextmanager
    def turn(self, session: str, connection: RpcConnection) -> Iterator[None]:
        """While it is open, the session's request is reported to this connection."""
        turn = _Turn(connection, now())
        self._turns.setdefault(session, turn)
        try:
            yield
        finally:
            if self._turns.get(session) is turn:
                del self._turns[session]

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            due = {
                session: turn for session, turn in self._turns.items() if turn.began <= now() - self._every_s
            }
            if due:
                try:
                    await self._report(due)
                except RpcError as error:
                    logger.warning("the engine does not tell what its turns have sampled: %s", error)

    async def _report(self, due: Mapping[str, _Turn]) -> None:
        found = await self._engine.progress({session: turn.told for session, turn in due.items()})
        for session, sampled in found.items():
            turn = due[session]
            if not len(sampled.tokens) or self._turns.get(session) is not turn:
                continue
            payload = {
                "session": session,
                "start": turn.told,
                "tokens": sampled.tokens.astype("<i4").tobytes(),
                "logprobs": sampled.logprobs.astype("<f4").tobytes(),
                "versions": sampled.versions.astype("<i4").tobytes(),
            }
            turn.told += len(sampled.tokens)
            await turn.connection.notify("sampled", payload)
