"""An asyncio event loop whose clock jumps to the next timer: the control plane runs on it as in real time.

Code that takes time from its event loop (`infra.clock`) and reaches the outside only through back ends that
are themselves on the loop runs unchanged, as fast as it can be computed. Order is fixed: what becomes ready
first runs first, and timers of one instant run in the order in which they were set.
"""

import asyncio
import contextlib
import contextvars
import gc
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

_NAMED = 8  # tasks that the message of a stand-still names
_SWEEP_FROM = 128  # cancelled timers that lie among the others, before these are gone through
_COLLECT_EVERY = 200_000  # objects made and not freed, between two looks at the youngest of them


class StandStill(RuntimeError):
    """Nothing is ready and no timer is set, or none before the horizon: what runs waits for itself."""


def _nothing() -> None:
    """What a cancelled callback does."""


class _Soon(asyncio.Handle):
    """A callback that waits for its turn.

    What the base class keeps for debugging is left out: one is made for every step of every task.
    """

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context
    ) -> None:
        self._callback = callback
        self._args = args
        self._context = context

    def cancel(self) -> None:
        self._callback, self._args = _nothing, ()

    def cancelled(self) -> bool:
        return self._callback is _nothing

    def __repr__(self) -> str:
        return f"<{self._callback!r}>"


class _Later(asyncio.TimerHandle):
    """A callback that waits for its time."""

    __slots__ = ("_waits_on",)

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context,
        when: float,
        waits_on: "VirtualTimeLoop",
    ) -> None:
        self._callback = callback
        self._args = args
        self._context = context
        self._when = when
        self._waits_on: VirtualTimeLoop | None = waits_on  # while it lies among the loop's timers

    def cancel(self) -> None:
        if self._callback is not _nothing:
            self._callback, self._args = _nothing, ()
            if self._waits_on is not None:
                self._waits_on._timer_cancelled()

    def cancelled(self) -> bool:
        return self._callback is _nothing

    def __repr__(self) -> str:
        return f"<{self._callback!r} at {self._when} s>"

    # The loop orders its timers by itself, and each is equal to itself only.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """`time()` starts at 0 and moves only when nothing is ready: to the next timer.

    Without one, or with none up to `horizon_s`, what runs the loop raises `StandStill`, which names the tasks
    that wait. There are no sockets, processes or signals (NotImplementedError), and nobody outside of its
    thread wakes it: `run_in_executor` runs the call at once, in no time.
    """

    # Of the base class it keeps tasks, generators and errors, and replaces the scheduling (`_run_once`).
    _stopping: bool

    def __init__(self, horizon_s: float = float("inf")):
        super().__init__()
        self.horizon_s = horizon_s
        self.events = 0
        """Callbacks run so far."""
        self._now = 0.0
        self._due: deque[_Soon | _Later] = deque()
        self._timers: list[tuple[float, int, _Later]] = []
        self._timers_set = 0
        self._timers_cancelled = 0  # of those in the list

    def time(self) -> float:
        """Seconds since the loop was made, of its own clock."""
        return self._now

    def call_soon(
        self,
        callback: Callable[[Unpack[Arguments]], object],
        *args: *Arguments,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        soon = _Soon(callback, args, contextvars.copy_context() if context is None else context)
        self._due.append(soon)
        return soon

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Arguments]], object],
        *args: *Arguments,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """As `call_soon`. From another thread only while the loop has something else to run."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Arguments]], object],
        *args: *Arguments,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self._set(self._now + delay, callback, args, context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Arguments]], object],
        *args: *Arguments,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self._set(when, callback, args, context)

    def _set(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> _Later:
        if context is None:
            context = contextvars.copy_context()
        timer = _Later(callback, args, context, when, self)
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, timer))
        return timer

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[Unpack[Arguments]], Result],
        *args: *Arguments,
    ) -> asyncio.Future[Result]:
        """Run the call now; the future is done."""
        done: asyncio.Future[Result] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def _run_once(self) -> None:
        """Run what is ready and, when nothing is, move the clock: until the loop is stopped."""
        due = self._due
        while not self._stopping:
            if not due:
                self._move_on()
            count = len(due)
            for _ in range(count):
                handle = due.popleft()
                try:
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    message = f"a callback failed: {handle!r}"
                    self.call_exception_handler({"message": message, "exception": error, "handle": handle})
            self.events += count

    def _move_on(self) -> None:
        """The clock jumps to the next timer; all of that instant are ready then."""
        timers = self._timers
        while timers and timers[0][2]._callback is _nothing:
            heapq.heappop(timers)
            self._timers_cancelled -= 1
        if not timers:
            raise self._stand_still("nothing is ready, and no timer is set")
        when = timers[0][0]
        if when > self.horizon_s:
            raise self._stand_still(f"nothing happens before {when:.6g} s, beyond {self.horizon_s:.6g} s")
        if when > self._now:
            self._now = when
        while timers and timers[0][0] <= when:
            timer = heapq.heappop(timers)[2]
            timer._waits_on = None
            if timer._callback is _nothing:
                self._timers_cancelled -= 1
            else:
                self._due.append(timer)

    def _timer_cancelled(self) -> None:
        self._timers_cancelled += 1
        if self._timers_cancelled > _SWEEP_FROM and 2 * self._timers_cancelled > len(self._timers):
            self._timers = [timer for timer in self._timers if timer[2]._callback is not _nothing]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    def _stand_still(self, why: str) -> StandStill:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: (len(task.get_name()), task.get_name()))
        named = [f"  {task.get_name()}: {_waits_in(task)}" for task in tasks[:_NAMED]]
        if len(tasks) > _NAMED:
            named.append(f"  and {len(tasks) - _NAMED} more")
        waiting = "\n".join([f"{len(tasks)} tasks wait:", *named]) if tasks else "no task is left"
        return StandStill(f"stand-still at {self._now:.6g} s: {why}; {waiting}")

    def close(self) -> None:
        super().close()
        self._due.clear()
        self._timers.clear()


def _waits_in(task: asyncio.Task[Any]) -> str:
    """The innermost coroutine of a task, and its line."""
    inner: Any = task.get_coro()
    while getattr(inner, "cr_await", None) is not None and hasattr(inner.cr_await, "cr_frame"):
        inner = inner.cr_await
    frame = getattr(inner, "cr_frame", None)
    return f"{inner.__qualname__}, line {frame.f_lineno}" if frame is not None else repr(inner)


def run_virtual(main: Coroutine[Any, Any, Result], horizon_s: float = float("inf")) -> Result:
    """Run `main` on a virtual clock to its end, and cancel what it leaves behind.

    Raises what it raises, or `StandStill` when it waits for what will not happen, or not before `horizon_s`:
    a limit for systems whose heart-beats would go on for ever.
    """
    runner = asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(horizon_s))
    stuck: StandStill | None = None
    try:
        with _rare_collections():
            return runner.run(main)
    except StandStill as error:
        stuck = error
        raise
    finally:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.horizon_s = float("inf")  # what is cancelled may take its time to end
        try:
            runner.close()
        except StandStill:
            if stuck is None:
                raise


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Let the garbage collector look less often: a simulation makes objects by the million, nearly all of
    which go by themselves. A tenth of its time is spent on looking for the others otherwise."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
