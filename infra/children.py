"""Warm, killable child processes for work that may hang, raise, leak or crash.

A child is `python -m module`, started once and called many times. Its standard input is both the way in and
its life line: when the parent ends, by whatever signal, the child reads end-of-file and exits. Any number of
calls may be outstanding; those made in one turn of the event loop travel in one write. What a child's code
prints goes to standard error, so it cannot break into the messages.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

from infra.child_messages import frame, frames
from infra.credentials import without_credentials


class ChildError(RuntimeError):
    """A call to a child process that brought no result."""


class ChildRaised(ChildError):
    """The child's code raised; the message is the exception's type and text."""


class ChildTimeout(ChildError):
    """The call took longer than its limit."""


class ChildDied(ChildError):
    """The child process ended, or could not be started."""


class Child(asyncio.SubprocessProtocol):
    """One child process, seen from its parent. Made by `Child.start`."""

    def __init__(self, module: str, on_exit: Callable[["Child"], None] | None):
        self._module = module
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._pending: dict[int, tuple[asyncio.Future[Any], asyncio.TimerHandle | None]] = {}
        self._outbox: list[bytes] = []
        self._inbox = bytearray()
        self._ready: asyncio.Future[Any] = self._loop.create_future()
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.SubprocessTransport | None = None
        self._stdin: asyncio.WriteTransport | None = None
        self.alive = False
        self.busy_seconds = 0.0
        """Spent on calls that it answered, by its own clock, where it says so (`serve_in_order`)."""

    @classmethod
    async def start(
        cls,
        module: str,
        settings: dict[str, Any],
        *,
        limits: Mapping[str, int] | None = None,
        start_limit_s: float = 120.0,
        on_exit: Callable[["Child"], None] | None = None,
    ) -> "Child":
        """Start `python -m module` and return once it is ready for calls.

        `limits` are resource limits by the names of `resource.RLIMIT_*` (`{"AS": bytes, "CPU": seconds}`),
        set in the child before it does anything. Credentials of stores are left out of its environment.
        Hash randomisation is off in the child, so that what it draws from sets is the same in every child.
        `on_exit` is called once when the process ends for whatever reason. Raises `ChildDied` when it ends
        or stays silent for `start_limit_s`.
        """
        child = cls(module, on_exit)
        transport, _ = await child._loop.subprocess_exec(
            lambda: child,
            sys.executable,
            "-m",
            module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=None,
            env={**without_credentials(os.environ), "PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        child._transport = transport
        child._stdin = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
        child._send([None, None, {**settings, "limits": dict(limits or {}), "parent": os.getpid()}])
        try:
            async with asyncio.timeout(start_limit_s):
                await child._ready
        except BaseException as error:
            await child.stop()
            if isinstance(error, TimeoutError):
                raise ChildDied(f"{module} was not ready within {start_limit_s} s") from None
            raise
        return child

    @property
    def pid(self) -> int:
        assert self._transport is not None
        return self._transport.get_pid()

    @property
    def outstanding(self) -> int:
        return len(self._pending)

    def request(
        self,
        op: str,
        payload: Any,
        limit_s: float | None = None,
        on_timeout: Callable[[], None] | None = None,
    ) -> asyncio.Future[Any]:
        """Send a call; the future has its result, or `ChildRaised`, `ChildTimeout` or `ChildDied`.

        A time-out leaves the child running and calls `on_timeout`, also when the future was cancelled
        meanwhile: whether to kill is for the caller, who knows what else the child is doing.
        """
        future: asyncio.Future[Any] = self._loop.create_future()
        if not self.alive:
            future.set_exception(ChildDied(f"{self._module} has ended"))
            return future
        call_id = next(self._ids)
        timer = None
        if limit_s is not None:
            timer = self._loop.call_later(limit_s, self._timed_out, call_id, limit_s, on_timeout)
        self._pending[call_id] = (future, timer)
        self._send([call_id, op, payload])
        return future

    def post(self, op: str, payload: Any) -> None:
        """Send a message that has no answer. A child that has ended is not an error."""
        if self.alive:
            self._send([None, op, payload])

    def kill(self) -> bool:
        """SIGKILL to the child and every process of its group; False when it had ended before.

        Outstanding calls end with `ChildDied`. `on_exit` is told when it is gone.
        """
        if self._exited.done() or self._transport is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)
        self._ended()
        return True

    async def stop(self) -> None:
        """Kill it and wait until it is gone."""
        if self._transport is not None:
            self.kill()
            await asyncio.shield(self._exited)

    # ---- asyncio.SubprocessProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.alive = True

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        for call_id, status, value, seconds in frames(self._inbox, data):
            self.busy_seconds += seconds
            if call_id is None:
                if not self._ready.done():
                    self._ready.set_result(value)
                continue
            entry = self._pending.pop(call_id, None)
            if entry is None:
                continue
            future, timer = entry
            if timer is not None:
                timer.cancel()
            if not future.done():
                if status:
                    future.set_result(value)
                else:
                    future.set_exception(ChildRaised(value))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self._ended()

    def process_exited(self) -> None:
        self._ended()
        if not self._exited.done():
            self._exited.set_result(None)
        if self._transport is not None:
            self._transport.close()
        if self._on_exit is not None:
            self._on_exit(self)

    # ---- inside

    def _send(self, message: list[Any]) -> None:
        framed = frame(message)
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(framed)

    def _flush(self) -> None:
        if self.alive and self._stdin is not None:
            self._stdin.write(b"".join(self._outbox))
        self._outbox.clear()

    def _timed_out(self, call_id: int, limit_s: float, on_timeout: Callable[[], None] | None) -> None:
        future, _ = self._pending.pop(call_id)
        if not future.done():
            future.set_exception(ChildTimeout(f"no answer within {limit_s} s"))
        if on_timeout is not None:
            on_timeout()

    def _ended(self) -> None:
        self.alive = False
        died = ChildDied(f"{self._module} ended with calls outstanding")
        if not self._ready.done():
            self._ready.set_exception(ChildDied(f"{self._module} ended before it was ready"))
            self._ready.exception()  # the one who waits for it may be gone
        for future, timer in self._pending.values():
            if timer is not None:
                timer.cancel()
            if not future.done():
                future.set_exception(died)
        self._pending.clear()
