"""Every part of a run is watched while the run is up; the first that is lost ends it, with one error.

What can be restarted in place is not here: Dask's nanny restarts environment workers, pools of children
replace reward workers and environment hosts, and the proxy sets failed engines aside. What is here has no
substitute, so the run ends in order and is started again from its newest checkpoint.
"""

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.blocking_calls import in_daemon_thread
from infra.launcher import Service
from infra.object_store import ObjectStore
from tasks.campaign import SupervisionConfig
from tasks.vital_signs import VitalSigns

logger = logging.getLogger(__name__)

_FULL_BELOW_BYTES = 1 << 20
_FAREWELL_S = 1.0
"""How long after an error of the run's own a part may take to be seen as ended."""
_INSIST_EVERY_S = 10.0
"""A body that was cancelled may wait again on its way out, for what is lost."""


class PartLost(RuntimeError):
    """A part of the run ended or no longer answers. The message says which, why, and what to do."""

    def __init__(self, part: str, why: str, advice: str = ""):
        super().__init__(f"{part} is lost: {why}" + (f"\n{advice}" if advice else ""))
        self.part = part
        self.why = why
        self.advice = advice


def lost_part(error: BaseException | None) -> PartLost | None:
    """The loss that an error is, or that it was raised on the way out of."""
    while error is not None and not isinstance(error, PartLost):
        error = error.__cause__ or error.__context__
    return error


@dataclass(frozen=True, slots=True)
class Part:
    """What is watched. Without `ended` it is known by its signs alone, without `sign` by its end alone."""

    name: str
    ended: Callable[[], Awaitable[str]] | None = None
    """Returns why, once the part has ended; raises `PartLost` where that knows more."""
    sign: Callable[[], Awaitable[object]] | None = None
    """Returns when the part has given a sign of life; raises, or takes too long, when it has not."""
    log: Path | None = None


class Supervisor:
    """Watches parts on behalf of one task, the one that enters `attending`."""

    def __init__(
        self,
        config: SupervisionConfig,
        disk: Path | None = None,
        *,
        insist_every_s: float = _INSIST_EVERY_S,
    ):
        """`disk` is a folder of the file system that the run writes to."""
        self._config = config
        self._disk = disk
        self._watches: dict[asyncio.Task[None], Part] = {}
        self._body: asyncio.Task[Any] | None = None
        self._insist_every_s = insist_every_s
        self._insisting: asyncio.TimerHandle | None = None
        self.lost: PartLost | None = None
        self.advice = ""
        """Said to whoever reads the error."""

    def watch(self, part: Part) -> None:
        """Watch a part until the body of `attending` has ended."""
        if part.ended is not None:
            self._begin(self._until_ended(part, part.ended), part)
        if part.sign is not None:
            self._begin(self._until_silent(part, part.sign), part)

    def release(self) -> None:
        """Stop watching: the parts are about to be taken down on purpose."""
        for watch in self._watches:
            watch.cancel()
        self._watches.clear()
        if self._insisting is not None:
            self._insisting.cancel()

    @asynccontextmanager
    async def attending(self) -> AsyncIterator[None]:
        """Raises `PartLost` once a part is lost, in the place of whatever that loss does to the body.

        A body that waits is cancelled; one that failed by itself first has its parts asked whether that is
        why, and keeps its own error when all of them answer.
        """
        self._body = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if self.lost is None:
                raise
            assert self._body is not None
            while self._body.cancelling():
                self._body.uncancel()
            raise self.lost from None
        except Exception as error:
            lost = self.lost
            if lost is None:
                raise
            logger.info("what the loss of %s led to: %s: %s", lost.part, type(error).__name__, error)
            raise lost from None
        finally:
            self._body = None
            self.release()

    @asynccontextmanager
    async def explaining(self) -> AsyncIterator[None]:
        """Inside of `attending`, while the parts are up: an error of the body that a lost part explains
        becomes `PartLost`."""
        try:
            yield
        except Exception as error:
            if self.lost is None:
                await self._find_cause(error)
            raise

    async def _find_cause(self, error: Exception) -> None:
        if self._disk is not None and shutil.disk_usage(self._disk).free < _FULL_BELOW_BYTES:
            self._lose(
                PartLost(
                    f"the disk of {self._disk}",
                    f"it is full ({type(error).__name__}: {error})",
                    f"Free some of it. {self.advice}",
                )
            )
            return
        if self._watches:
            await asyncio.wait(self._watches, timeout=_FAREWELL_S, return_when=asyncio.FIRST_COMPLETED)
        asked = [part for part in dict.fromkeys(self._watches.values()) if part.sign is not None]
        signs = await asyncio.gather(*(self._asked(part) for part in asked))
        for part, problem in zip(asked, signs, strict=True):
            if problem is not None and self.lost is None:
                self._lose(self._loss(part, problem))

    async def _asked(self, part: Part) -> str | None:
        """Why a part gives no sign of life just now, or None when it does."""
        assert part.sign is not None
        try:
            async with asyncio.timeout(self._config.every_s):
                await part.sign()
        except TimeoutError:
            return f"no sign of life within {self._config.every_s:g} s"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    async def _until_ended(self, part: Part, ended: Callable[[], Awaitable[str]]) -> None:
        try:
            why = await ended()
        except PartLost as lost:
            self._lose(PartLost(lost.part, lost.why, lost.advice or self.advice))
            return
        except Exception as error:  # it cannot even be watched
            why = f"{type(error).__name__}: {error}"
        self._lose(self._loss(part, why))

    async def _until_silent(self, part: Part, sign: Callable[[], Awaitable[object]]) -> None:
        every_s, limit_s = self._config.every_s, self._config.silence_limit_s
        signs = VitalSigns(every_s, limit_s)
        problem = ""
        while not signs.lost:
            async with _at_least(every_s):
                try:
                    async with asyncio.timeout(every_s):
                        await sign()
                    signs.heard()
                except TimeoutError:
                    problem = "it does not answer"
                    signs.unheard()
                except Exception as error:  # whatever the part's client raises
                    problem = f"{type(error).__name__}: {error}"
                    signs.unheard()
        self._lose(self._loss(part, f"{problem} for {limit_s:g} s (supervision.silence_limit_s)"))

    def _begin(self, watching: Any, part: Part) -> None:
        watch = asyncio.create_task(watching)
        self._watches[watch] = part

    def _loss(self, part: Part, why: str) -> PartLost:
        log = f"; its log is {part.log}" if part.log is not None else ""
        return PartLost(part.name, f"{why}{log}", self.advice)

    def _lose(self, lost: PartLost) -> None:
        if self.lost is None:
            self.lost = lost
            logger.warning("the run ends, since a part of it is gone: %s", lost.part)
            self._end_body()

    def _end_body(self) -> None:
        """Cancel the body, and again until it has begun to take the parts down."""
        if self._body is not None and self._body is not asyncio.current_task():
            self._body.cancel()
            self._insisting = asyncio.get_running_loop().call_later(self._insist_every_s, self._end_body)


@asynccontextmanager
async def _at_least(seconds: float) -> AsyncIterator[None]:
    """The body, and then what is left of so many seconds."""
    rest = asyncio.ensure_future(asyncio.sleep(seconds))
    try:
        yield
        await rest
    finally:
        rest.cancel()


def service_part(name: str, service: Service, log: Path | None = None) -> Part:
    return Part(name, service.ended, service.alive, log)


def store_part(name: str, url: str, reach: Callable[[], object]) -> Part:
    """A remote store, asked by the blocking call `reach` in a thread that no exit waits for.

    One call at a time: a server that is frozen holds one thread, however long.
    """
    under_way: asyncio.Future[object] | None = None

    async def sign() -> None:
        nonlocal under_way
        if under_way is None or under_way.done():
            under_way = in_daemon_thread(reach)
        await asyncio.shield(under_way)

    return Part(f"{name} ({url})", sign=sign)


def object_store_part(name: str, store: ObjectStore) -> Part:
    return store_part(name, store.url, lambda: store.exists("alive"))
