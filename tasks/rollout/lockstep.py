"""Batch-level interaction: all live trajectories generate a turn together, then all their environments step.

`TurnRounds` decides, `Lockstep` holds the requests. A round begins once every expected trajectory that is not
over has asked for a turn; its answers are given out once every trajectory of the round has its own. So the
slowest environment and the longest generation hold up all others, as in RollArt's `Sync` baseline (§7.1).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

Waiting = dict[str, list["asyncio.Future[None]"]]


@dataclass(frozen=True, slots=True)
class Moves:
    """Who may go on after an event."""

    begin: frozenset[str] = frozenset()
    """Their generation may begin."""
    release: frozenset[str] = frozenset()
    """Their answers may be given out."""
    episodes_over: bool = False
    """No expected trajectory is in an episode any more."""


class TurnRounds:
    """Pure. A trajectory nobody expects (of an evaluation, or one that runs again after its end) waits for
    nobody, and nobody waits for it."""

    def __init__(self) -> None:
        self._live: set[str] = set()  # expected, episode not over
        self._asked: set[str] = set()
        self._playing: set[str] = set()  # of the round under way, without an answer
        self._answered: set[str] = set()  # of the round under way

    @property
    def live(self) -> frozenset[str]:
        return frozenset(self._live)

    def expect(self, names: Iterable[str]) -> None:
        """These will ask for turns; no round begins without them from now on."""
        self._live.update(names)

    def ask(self, name: str) -> Moves:
        """A trajectory has a turn to generate. With a round under way it takes part in the next."""
        if name not in self._live:
            return Moves(begin=frozenset({name}))
        self._asked.add(name)
        return self._moves()

    def withdraw(self, name: str) -> Moves:
        """Whoever asked is gone before the round began; the trajectory may ask again."""
        self._asked.discard(name)
        return Moves()

    def answered(self, name: str) -> Moves:
        """The turn's generation ended, well or not."""
        if name not in self._playing:
            return Moves(release=frozenset({name}))
        self._playing.discard(name)
        self._answered.add(name)
        return self._moves()

    def over(self, names: Iterable[str]) -> Moves:
        """These generate no more: their episodes ended, were aborted, or were lost. Whoever still waits for
        one of them goes on."""
        gone = frozenset(names)
        for group in (self._live, self._asked, self._playing, self._answered):
            group.difference_update(gone)
        moves = self._moves()
        return Moves(moves.begin | gone, moves.release | gone, moves.episodes_over)

    def _moves(self) -> Moves:
        release: frozenset[str] = frozenset()
        begin: frozenset[str] = frozenset()
        if not self._playing:
            release, self._answered = frozenset(self._answered), set()
            if self._live and self._live <= self._asked:
                self._playing, self._asked = self._asked, set()
                begin = frozenset(self._playing)
        return Moves(begin, release, not self._live)


class Lockstep:
    """Holds turns and answers until `TurnRounds` lets them go."""

    def __init__(self) -> None:
        self._rounds = TurnRounds()
        self._begins: Waiting = {}
        self._releases: Waiting = {}
        self._ends: dict[asyncio.Future[None], None] = {}

    def expect(self, names: Iterable[str]) -> None:
        """Before any of these asks for its first turn."""
        self._rounds.expect(names)

    def over(self, names: Iterable[str]) -> None:
        """These trajectories ended, were aborted or were lost."""
        self._perform(self._rounds.over(names))

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """One turn's generation: entered as its round begins, left once all turns of the round are answered.

        A turn that raises is left at once. One of a trajectory that is over is held neither before nor after,
        so the gate belongs inside.
        """
        await self._held(self._begins, name, self._rounds.ask)
        try:
            yield
        except BaseException:
            self._perform(self._rounds.answered(name))
            raise
        await self._held(self._releases, name, self._rounds.answered)

    async def episode_over(self, name: str) -> None:
        """The episode of `name` is over. Returns once those of all expected trajectories are.

        A trajectory nobody expects waits for nobody.
        """
        if name not in self._rounds.live:
            return
        future = asyncio.get_running_loop().create_future()
        self._ends[future] = None
        self._perform(self._rounds.over([name]))
        try:
            await future
        finally:
            self._ends.pop(future, None)

    async def _held(self, waiting: Waiting, name: str, event: Callable[[str], Moves]) -> None:
        future = asyncio.get_running_loop().create_future()
        waiting.setdefault(name, []).append(future)
        self._perform(event(name))
        try:
            await future
        except asyncio.CancelledError:
            if waiting is self._begins:
                self._leave(future, name)
            raise

    def _leave(self, future: "asyncio.Future[None]", name: str) -> None:
        """Whoever asked is cancelled before the generation began, though perhaps not before the round did."""
        if not future.cancelled():
            self._perform(self._rounds.answered(name))
            return
        waiting = self._begins.get(name, [])
        if future in waiting:
            waiting.remove(future)
        if not waiting:
            self._begins.pop(name, None)
            self._perform(self._rounds.withdraw(name))

    def _perform(self, moves: Moves) -> None:
        for names, waiting in ((moves.begin, self._begins), (moves.release, self._releases)):
            for name in sorted(names):  # in the same order wherever this runs
                for future in waiting.pop(name, []):
                    if not future.done():
                        future.set_result(None)
        if moves.episodes_over:
            for future in self._ends:
                if not future.done():
                    future.set_result(None)
