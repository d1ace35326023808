"""Drives rewards through a function service: performs what `RewardQueue` decides."""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import msgpack

from infra.clock import now
from tasks.reward.activation import ActivationOrder
from tasks.reward.config import ServerlessConfig
from tasks.reward.lithops_service import LithopsService
from tasks.reward.mailbox import STOP, Report, Work, inbox, outbox, pack_order, unpack_report
from tasks.reward.reward_queue import Action, GiveUp, RewardQueue, Send, ServerlessCounts, Start
from tasks.reward.serverless import ServerlessTraits
from tasks.trajectory import InfraError, Outcome, outcome_from_json

logger = logging.getLogger(__name__)

_KEPT_OUTCOMES = 8192
_IDLE_LOOK_S = 1.0
_STATUS_EVERY_S = 1.0
_STOP_LIMIT_S = 5.0
_MAIL_THREADS = 4
_Result = TypeVar("_Result")


class ServerlessRewards:
    """Judges rewards on a function service, in batches. Of one event loop.

    A reward's identity is the digest of trajectory name, function and input: asked again it gets the first
    outcome, also while that is on its way, and whatever comes later is dropped. A reward that raises or hangs
    is an `InfraError` at once; one whose activation failed or was lost is tried again, and is an `InfraError`
    when its tries are used up.
    """

    def __init__(
        self,
        config: ServerlessConfig,
        functions: Mapping[str, ServerlessTraits],
        *,
        process_memory_mb: int | None = None,
    ):
        """`process_memory_mb` bounds the address space of one reward process."""
        self._config = config
        self._functions = functions
        self._process_memory_mb = process_memory_mb
        self._root = f"{config.prefix}/{uuid.uuid4().hex}"
        self._queue = RewardQueue(config, (f"a{number:06d}" for number in itertools.count()))
        self._places = asyncio.Semaphore(config.max_waiting)
        self._futures: dict[str, asyncio.Future[Outcome]] = {}
        self._known: OrderedDict[str, Outcome] = OrderedDict()
        self._wanted = asyncio.Event()
        self._reports: deque[tuple[str, Report]] = deque()
        self._next_report: dict[str, int] = {}
        self._reading = threading.Lock()
        self._handles: dict[str, Any] = {}  # what Lithops knows an activation by
        self._next_status = 0.0
        self._sent = itertools.count()
        self._background: set[asyncio.Task[None]] = set()
        self._closed = ""  # why, once it is
        self._service: LithopsService | None = None
        self._invoking = ThreadPoolExecutor(1, thread_name_prefix="reward-activations")
        self._mailing = ThreadPoolExecutor(_MAIL_THREADS, thread_name_prefix="reward-mail")
        self._running: asyncio.Task[None] | None = None

    @property
    def counts(self) -> ServerlessCounts:
        """What this dispatch has done so far: for metrics."""
        return self._queue.counts

    @property
    def function_seconds(self) -> float:
        """Of activations so far, those that run included."""
        return self._queue.function_seconds(now())

    async def start(self) -> None:
        """Open the service and begin its warm activations. Raises `ServerlessError`."""
        sections: dict[str, Any] = {}
        if self._config.block is not None:
            from blocks.functions import FunctionsBlock

            block = cast(FunctionsBlock, await FunctionsBlock.aload(self._config.block))
            sections = block.open()
        asked = max((traits.memory_mb for traits in self._functions.values()), default=1024)
        self._service = await self._mail(
            LithopsService, self._config, sections, self._config.memory_mb or asked
        )
        self._perform(self._queue.warm_up(now()))
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def score(self, function: str, fields: list[Any], limit_s: float, name: str = "") -> Outcome:
        """Judge `fields` (of `RewardInput`, in order) of the trajectory `name`. Never raises, never hangs.

        `limit_s` counts where it is shorter than the function's own limit.
        """
        key = hashlib.blake2b(msgpack.packb([name, function, fields]), digest_size=16).hexdigest()
        if self._is_new(key):
            await self._places.acquire()
            if self._is_new(key) and not self._closed:
                self._ask(key, function, fields, limit_s)
            else:
                self._places.release()
        else:
            self.counts.repeated += 1
        if key in self._known:
            return self._known[key]
        if key not in self._futures:
            return InfraError(f"reward {function}: {self._closed}")
        return await asyncio.shield(self._futures[key])

    async def close(self) -> None:
        """End the activations and delete what is stored. Rewards that are open become `InfraError`s."""
        self._fail_open("the function service was closed")
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, *self._background, return_exceptions=True)
        if self._service is not None:
            with contextlib.suppress(
                Exception
            ):  # a storage that is down must not keep the worker from ending
                await self._stop_activations()
            try:
                await self._mail(self._service.close, self._root)
            except Exception as error:
                logger.warning("the function service did not close in good order: %s", error)
        self._invoking.shutdown(wait=False, cancel_futures=True)
        self._mailing.shutdown(wait=False, cancel_futures=True)

    # ---- inside

    def _is_new(self, key: str) -> bool:
        return key not in self._known and key not in self._futures

    def _ask(self, key: str, function: str, fields: list[Any], limit_s: float) -> None:
        traits = self._functions[function]
        retries = traits.retries if self._config.retries is None else self._config.retries
        self._futures[key] = asyncio.get_running_loop().create_future()
        self._queue.ask(Work(key, function, fields, min(limit_s, traits.limit_s)), retries, now())
        self._wanted.set()

    async def _run(self) -> None:
        try:
            while True:
                self._wanted.clear()
                await self._look()
                self._perform(self._queue.plan(now()))
                if self._queue.open:
                    await asyncio.sleep(self._config.poll_s)
                elif self._queue.activations:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._wanted.wait(), _IDLE_LOOK_S)
                else:
                    await self._wanted.wait()
        except Exception as error:  # whoever waits for a reward must hear of it
            logger.exception("the dispatch of rewards failed")
            self._fail_open(f"its dispatch failed: {type(error).__name__}: {error}")

    def _fail_open(self, reason: str) -> None:
        """End every open reward, and take no more."""
        self._closed = self._closed or reason
        for key in list(self._futures):
            self._end(key, InfraError(reason))

    async def _look(self) -> None:
        """Hear what activations have said. A storage that fails or hangs makes them silent, not this loop."""
        if not self._queue.activations:
            return
        try:
            async with asyncio.timeout(self._config.silence_limit_s):
                await self._mail(self._read_reports)
                if now() >= self._next_status:
                    self._next_status = now() + _STATUS_EVERY_S
                    await self._mail(self._read_failures)
        except Exception as error:
            logger.warning("cannot read results of the function service: %s: %s", type(error).__name__, error)
            await asyncio.sleep(self._config.retry_pause_s)
        self._hear()

    def _hear(self) -> None:
        while self._reports:
            activation, report = self._reports.popleft()
            outcomes = dict(report.results)
            for key in self._queue.heard(activation, report, now()):
                if key in self._futures:
                    self._end(key, outcome_from_json(outcomes[key]))
            if report.kind == "failed":
                logger.warning("reward activation %s failed: %s", activation, report.text)
            if report.kind in ("failed", "ended"):
                self._handles.pop(activation, None)

    def _read_reports(self) -> None:
        """Keeps what it reads, since the one who asked may have stopped waiting."""
        assert self._service is not None
        with self._reading:
            read = []
            for key in self._service.list_keys(outbox(self._root)):
                activation, number = key.split("/")[-2:]
                if not number.isdecimal() or int(number) != self._next_report.get(activation, 0):
                    continue
                report = unpack_report(self._service.get(key))
                if report is not None:
                    self._next_report[activation] = int(number) + 1
                    self._reports.append((activation, report))
                    read.append(key)
            self._service.delete(read)

    def _read_failures(self) -> None:
        assert self._service is not None
        for activation, handle in list(self._handles.items()):
            reason = self._service.failed(handle)
            if reason is not None:
                self._reports.append((activation, Report("failed", text=reason)))

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case GiveUp(key, reason):
                    if key in self._futures:
                        self._end(key, InfraError(f"function service {self._config.backend}: {reason}"))
                case Start(activation, work):
                    self._in_background(self._invoke(activation, work))
                case Send(activation, work):
                    key = f"{inbox(self._root, activation)}{next(self._sent):08d}"
                    self._in_background(self._send(activation, key, work))

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _invoke(self, activation: str, work: list[Work]) -> None:
        assert self._service is not None
        order = ActivationOrder(
            root=self._root,
            name=activation,
            functions=sorted(self._functions),
            work=pack_order(work),
            processes=self._config.processes,
            memory_mb=self._process_memory_mb,
            idle_s=self._config.idle_limit_s,
            life_s=self._config.life_s,
            poll_s=self._config.poll_s,
            alive_s=self._config.silence_limit_s / 3,
        )
        loop = asyncio.get_running_loop()
        try:
            self._handles[activation] = await loop.run_in_executor(
                self._invoking, self._service.invoke, order.pack()
            )
        except Exception as error:
            self._lose(activation, f"it cannot be invoked: {type(error).__name__}: {error}")

    async def _send(self, activation: str, key: str, work: list[Work]) -> None:
        assert self._service is not None
        try:
            await self._mail(self._service.put, key, pack_order(work))
        except Exception as error:
            self._lose(activation, f"its storage takes nothing: {type(error).__name__}: {error}")

    def _lose(self, activation: str, reason: str) -> None:
        logger.warning("reward activation %s: %s", activation, reason)
        self._queue.lost(activation, reason, now())
        self._wanted.set()

    def _end(self, key: str, outcome: Outcome) -> None:
        future = self._futures.pop(key)
        self._places.release()
        if not isinstance(outcome, InfraError):
            self._known[key] = outcome
            if len(self._known) > _KEPT_OUTCOMES:
                self._known.popitem(last=False)
        if not future.done():
            future.set_result(outcome)

    async def _stop_activations(self) -> None:
        """Ask every activation to end, and wait a while for those that had reported."""
        assert self._service is not None
        for activation in self._queue.activations:
            await self._mail(self._service.put, f"{inbox(self._root, activation)}{STOP}", b"")
        patience = now() + _STOP_LIMIT_S
        while len(self._queue.activations) > len(self._queue.starting()) and now() < patience:
            await self._mail(self._read_reports)
            self._hear()
            await asyncio.sleep(self._config.poll_s)

    async def _mail(self, call: Callable[..., _Result], *arguments: Any) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._mailing, call, *arguments)
