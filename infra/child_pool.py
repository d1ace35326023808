"""A constant number of warm children that answer calls in order, and are replaced when one hangs or dies."""

import asyncio
import functools
from collections import deque
from collections.abc import Mapping
from typing import Any

from infra.children import Child, ChildDied, ChildTimeout


class _Call:
    __slots__ = ("future", "limit_s", "op", "payload")

    def __init__(self, op: str, payload: Any, limit_s: float, future: asyncio.Future[Any]):
        self.op = op
        self.payload = payload
        self.limit_s = limit_s
        self.future = future


class _Slot:
    """A place of the pool: its child, if it has one now, and the calls sent to it, oldest first."""

    def __init__(self) -> None:
        self.child: Child | None = None
        self.starting: asyncio.Task[None] | None = None
        self.sent: deque[_Call] = deque()
        self.timer: asyncio.TimerHandle | None = None


class ChildPool:
    """A constant number of children that answer calls in the order they get them (`serve_in_order`).

    Queued calls travel many to a message. A call's limit runs from when the child can begin with it, so a
    call is never charged for its predecessors or for a child's start. A child that goes over is killed and
    replaced; only the call it was busy with fails, those behind it go to another child.
    """

    def __init__(
        self,
        module: str,
        settings: dict[str, Any],
        size: int,
        *,
        limits: Mapping[str, int] | None = None,
        depth: int = 16,
        start_limit_s: float = 120.0,
    ):
        self._module = module
        self._settings = settings
        self._limits = limits
        self._depth = depth
        self._start_limit_s = start_limit_s
        self._slots = [_Slot() for _ in range(size)]
        self._waiting: deque[_Call] = deque()
        self._leaving: set[Child] = set()  # killed, not gone yet
        self._closed = False
        self._spent_seconds = 0.0  # of children that are gone
        self.calls = 0
        """Calls that were begun, so far."""

    async def start(self) -> None:
        """Start every child. Raises `ChildDied` when one does not come up."""
        for slot in self._slots:
            self._restart(slot)
        await asyncio.gather(*(slot.starting for slot in self._slots if slot.starting is not None))
        if not all(slot.child for slot in self._slots):
            raise ChildDied(f"{self._module} did not start; its error is on standard error")

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that are ready for calls."""
        return [slot.child.pid for slot in self._slots if slot.child is not None]

    @property
    def size(self) -> int:
        return len(self._slots)

    @property
    def busy_seconds(self) -> float:
        """Seconds that children have spent on calls so far, by their own clocks. A call that was killed
        counts with its limit; the work on one whose child died is not known and left out."""
        return self._spent_seconds + sum(slot.child.busy_seconds for slot in self._slots if slot.child)

    async def call(self, op: str, payload: Any, limit_s: float) -> Any:
        """Raises `ChildRaised`, `ChildTimeout` (the child was killed) or `ChildDied`."""
        call = _Call(op, payload, limit_s, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        for slot in self._slots:
            if slot.child is None and slot.starting is None:
                self._restart(slot)
        self._dispatch()
        return await call.future

    async def close(self) -> None:
        """Kill every child; calls still waiting end with `ChildDied`."""
        self._closed = True
        starting = [slot.starting for slot in self._slots if slot.starting is not None]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        for slot in self._slots:
            self._replace(slot)
        self._fail_waiting("the pool was closed")
        await asyncio.gather(*(child.stop() for child in self._leaving))

    def _restart(self, slot: _Slot) -> None:
        if not self._closed:
            slot.starting = asyncio.get_running_loop().create_task(self._start_child(slot))

    async def _start_child(self, slot: _Slot) -> None:
        try:
            slot.child = await Child.start(
                self._module,
                self._settings,
                limits=self._limits,
                start_limit_s=self._start_limit_s,
                on_exit=lambda child: self._lost(slot, child),
            )
        except ChildDied as error:
            if not any(other.child or (other.starting and other is not slot) for other in self._slots):
                self._fail_waiting(str(error))
        finally:
            slot.starting = None
        self._dispatch()

    def _fail_waiting(self, text: str) -> None:
        for call in self._waiting:
            if not call.future.done():
                call.future.set_exception(ChildDied(text))
        self._waiting.clear()

    def _dispatch(self) -> None:
        while self._waiting:
            ready = [slot for slot in self._slots if slot.child is not None and len(slot.sent) < self._depth]
            if not ready:
                return
            slot = min(ready, key=lambda slot: len(slot.sent))
            call = self._waiting.popleft()
            if call.future.cancelled():
                continue
            assert slot.child is not None
            slot.sent.append(call)
            self.calls += 1
            answer = slot.child.request(call.op, call.payload)
            answer.add_done_callback(functools.partial(self._answered, slot, slot.child))
            if len(slot.sent) == 1:
                self._watch(slot)

    def _watch(self, slot: _Slot) -> None:
        """Time the call that the child is busy with now."""
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None
        if slot.sent:
            limit_s = slot.sent[0].limit_s
            slot.timer = asyncio.get_running_loop().call_later(limit_s, self._over_limit, slot)

    def _answered(self, slot: _Slot, child: Child, answer: asyncio.Future[Any]) -> None:
        error = answer.exception()
        if slot.child is not child or isinstance(error, ChildDied):
            return  # whoever replaced it dealt with all of its calls; `_lost` will if nobody did
        call = slot.sent.popleft()
        if not call.future.done():
            if error is None:
                call.future.set_result(answer.result())
            else:
                call.future.set_exception(error)
        self._watch(slot)
        self._dispatch()

    def _over_limit(self, slot: _Slot) -> None:
        busy = slot.sent.popleft()
        self._spent_seconds += busy.limit_s
        if not busy.future.done():
            busy.future.set_exception(ChildTimeout(f"no answer within {busy.limit_s} s"))
        self._replace(slot)

    def _lost(self, slot: _Slot, child: Child) -> None:
        self._leaving.discard(child)
        if slot.child is not child:
            return
        if slot.sent:
            busy = slot.sent.popleft()
            if not busy.future.done():
                busy.future.set_exception(ChildDied(f"{self._module} ended during the call"))
        self._replace(slot)

    def _replace(self, slot: _Slot) -> None:
        child, slot.child = slot.child, None
        if child is not None:
            self._spent_seconds += child.busy_seconds
        self._waiting.extendleft(reversed(slot.sent))
        slot.sent.clear()
        self._watch(slot)
        if child is not None and child.kill():
            self._leaving.add(child)
        self._restart(slot)
        self._dispatch()
