"""The proxy's inference workers: connections, heart-beats, and what becomes of one that is lost."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from infra.clock import now
from infra.rpc import ConnectionLost, RpcClient, RpcError
from tasks.rollout.routing import Router, WorkerRole
from tasks.rollout.worker_life import RestartBudget, WorkerLife, WorkerPhase

logger = logging.getLogger(__name__)

_BEATS = 4  # heart-beats in the time after which an unanswered one means a loss


@dataclass(frozen=True, slots=True)
class EngineAddress:
    name: str
    url: str
    token: str | None = None
    pool: str = "default"
    role: WorkerRole = "both"


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """`heartbeat_s`: a worker that answers nothing for so long is lost. `command_s`: one that has not carried
    out a command (suspend, load_weights, ...) after so long is too. `restarts` in `restart_window_s`: how
    often a worker may be started again; 0 where nobody does."""

    heartbeat_s: float = 30.0
    command_s: float = 600.0
    restarts: int = 0
    restart_window_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Losses:
    """Why workers were lost, by their names."""

    restart: dict[str, str]
    """To be started again, by whoever is told of them."""
    set_aside: dict[str, str]
    """What is left of them may be ended."""
    left: bool
    """Whether any worker that samples serves, or may yet."""


@dataclass(eq=False, slots=True)
class _Worker:
    address: EngineAddress
    life: WorkerLife
    client: RpcClient | None = None  # while it serves
    why: str = ""  # it was lost


class Workers:
    """`on_notice(client, name, payload)` hears what a worker says unasked."""

    def __init__(
        self,
        router: Router,
        limits: WorkerLimits,
        on_notice: Callable[[RpcClient, str, Any], None] = lambda *_: None,
    ):
        self._router = router
        self._limits = limits
        self._on_notice = on_notice
        self._workers: dict[str, _Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._routed: set[str] = set()
        self._told: set[str] = set()  # set aside, and reported so
        self._stats: dict[str, dict[str, Any]] = {}
        self._past_stats: Counter[str] = Counter()

    @property
    def serving(self) -> list[str]:
        return [name for name, worker in self._workers.items() if worker.life.phase.serves]

    @property
    def awaited(self) -> bool:
        """Whether some worker that decodes serves or may yet."""
        return any(
            worker.life.phase is not WorkerPhase.SET_ASIDE and worker.address.role != "prefill"
            for worker in self._workers.values()
        )

    def phases(self) -> dict[str, WorkerPhase]:
        return {name: worker.life.phase for name, worker in self._workers.items()}

    def address(self, name: str) -> EngineAddress:
        return self._workers[name].address

    def client(self, name: str) -> RpcClient:
        """The worker's connection. Raises `ConnectionLost` where it does not serve."""
        worker = self._workers[name]
        if worker.client is None:
            raise ConnectionLost(f"inference worker {name} does not serve ({worker.life.phase})")
        return worker.client

    async def changed(self) -> None:
        """Wait until a worker comes or goes."""
        await self._changed.wait()

    async def connect(self, address: EngineAddress) -> RpcClient:
        """A connection that gets no turns before `admit`. Raises `ConnectionLost`."""
        client = RpcClient(address.url, token=address.token)
        await client.connect(
            on_notice=lambda name, payload: self._on_notice(client, name, payload),
            timeout_s=self._limits.heartbeat_s,
        )
        return client

    def expect(self, address: EngineAddress, phase: WorkerPhase = WorkerPhase.STARTING) -> None:
        """This worker will join; turns wait for it rather than fail."""
        if address.name not in self._workers:
            budget = RestartBudget(self._limits.restarts, self._limits.restart_window_s)
            self._workers[address.name] = _Worker(address, WorkerLife(budget, phase))

    def admit(self, address: EngineAddress, client: RpcClient) -> None:
        """The worker holds the served version and gets turns from now on."""
        self.expect(address)
        worker = self._workers[address.name]
        if not worker.life.joined():
            raise RpcError("refused", f"{address.name} is {worker.life.phase}")
        worker.address, worker.client, worker.why = address, client, ""
        if address.name in self._routed:
            self._past_stats.update(counted(self._stats.pop(address.name, {})))
            self._router.restore(address.name)
        else:
            self._routed.add(address.name)
            self._router.add_worker(address.name, address.pool, address.role)
        self._start(self._watch(worker, client))
        self._announce()

    def lost(self, name: str, why: str, client: RpcClient | None = None) -> None:
        """Send it nothing more: calls under way raise `ConnectionLost`, and its turns go on elsewhere.

        With `client`, only if that is still its connection.
        """
        worker = self._workers[name]
        if (client is not None and client is not worker.client) or not worker.life.lost(now()):
            return
        worker.why = why
        if name in self._routed:
            self._router.set_aside(name)
        if worker.client is not None:
            dropped, worker.client = worker.client, None
            dropped.drop()
            self._start(dropped.close())
        if worker.life.phase is WorkerPhase.SET_ASIDE:
            logger.error("inference worker %s is set aside for the rest of the run: %s", name, why)
        else:
            logger.warning("inference worker %s is lost and will be started again: %s", name, why)
        self._announce()

    async def losses(self) -> Losses:
        """Wait until there are some that nobody has been told of, or no worker is left."""
        while True:
            restart = {name: worker.why for name, worker in self._workers.items() if worker.life.taken()}
            set_aside = {
                name: worker.why
                for name, worker in self._workers.items()
                if worker.life.phase is WorkerPhase.SET_ASIDE and name not in self._told
            }
            self._told.update(set_aside)
            if restart or set_aside or not self.awaited:
                return Losses(restart, set_aside, self.awaited)
            await self._changed.wait()

    async def command(self, name: str, method: str, payload: Any = None) -> Any:
        """Raises `RpcError`; a worker that does not carry it out within `command_s` is lost."""
        client = self.client(name)
        call = asyncio.ensure_future(client.call(method, payload))
        try:
            await asyncio.wait({call}, timeout=self._limits.command_s)
            if not call.done():
                self.lost(name, f"{method} took over {self._limits.command_s} s", client)
            return await call
        except ConnectionLost as error:
            self.lost(name, str(error), client)
            raise
        finally:
            call.cancel()

    async def command_all(
        self, method: str, payload: Any = None, names: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """Each worker's answer, or the `RpcError` it raised. One that is lost meanwhile is left out."""
        asked = self.serving if names is None else list(names)
        answers = await asyncio.gather(
            *(self.command(name, method, payload) for name in asked), return_exceptions=True
        )
        found = {}
        for name, answer in zip(asked, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, RpcError):
                raise answer
            if not isinstance(answer, ConnectionLost):
                found[name] = answer
        return found

    async def stats(self) -> tuple[dict[str, dict[str, Any]], Counter[str]]:
        """Of every worker that serves, its own; and the sums of what lost lives had done when last asked."""
        answers = await self.command_all("stats")
        self._stats.update({name: each for name, each in answers.items() if isinstance(each, dict)})
        gone = Counter(self._past_stats)
        for name, stats in self._stats.items():
            if name not in answers:
                gone.update(counted(stats))
        return {name: self._stats[name] for name in answers if name in self._stats}, gone

    def leave(self) -> None:
        """Whoever these work for ends: that their connections do is no loss of theirs."""
        for worker in self._workers.values():
            worker.client = None

    async def close(self) -> None:
        for worker in self._workers.values():
            if worker.client is not None:
                self._start(worker.client.close())
                worker.client = None
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, worker: _Worker, client: RpcClient) -> None:
        """Until the connection ends or a heart-beat stays unanswered. A step may keep an engine from
        answering for seconds, so only `heartbeat_s` of silence is a loss."""
        name, limit_s = worker.address.name, self._limits.heartbeat_s
        why = "it closed the connection"
        closed = asyncio.ensure_future(client.wait_closed())
        try:
            while not closed.done() and worker.client is client:
                await asyncio.wait({closed}, timeout=limit_s / _BEATS)
                if closed.done():
                    break
                beat = asyncio.ensure_future(client.call("ping"))
                beat.add_done_callback(_heard)
                await asyncio.wait({beat, closed}, timeout=limit_s / 2, return_when=asyncio.FIRST_COMPLETED)
                if not beat.done():
                    worker.life.late()
                    await asyncio.wait(
                        {beat, closed}, timeout=limit_s / 2, return_when=asyncio.FIRST_COMPLETED
                    )
                if not beat.done() and not closed.done():
                    why = f"it is frozen: no answer for rollout.heartbeat_limit_s ({limit_s} s)"
                    break
                worker.life.answered()
        finally:
            self.lost(name, why, client)
            closed.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _heard(beat: asyncio.Future[Any]) -> None:
    """Whatever the answer is, an error too, it is one."""
    if not beat.cancelled():
        beat.exception()


def counted(stats: dict[str, Any]) -> dict[str, float]:
    """The numbers of an engine's stats, which may be summed or not."""
    return {name: value for name, value in stats.items() if isinstance(value, int | float)}
