"""A child process's end of its parent's messages (`infra.children` is the other end).

Imports little, so that a child starts fast.
"""

import ctypes
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from infra.child_messages import frame, frames

_PR_SET_PDEATHSIG = 1


class ParentChannel:
    """The child's end of the messages. One reader; any thread may answer."""

    def __init__(self) -> None:
        self._in = os.dup(0)
        self._out = os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        self._buffer = bytearray()
        self._writing = threading.Lock()
        self._received: deque[list[Any]] = deque()
        self.settings: dict[str, Any] = self.receive()[2]
        for name, value in self.settings.pop("limits").items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        _die_with(self.settings.pop("parent"))

    def receive(self) -> list[Any]:
        """The next message. When the parent is gone this ends the process."""
        while not self._received:
            data = os.read(self._in, 1 << 18)
            if not data:
                os._exit(0)
            self._received.extend(frames(self._buffer, data))
        return self._received.popleft()

    def messages(self) -> Iterator[list[Any]]:
        """Every message from now on; when the parent is gone the process ends."""
        while True:
            yield self.receive()

    def ready(self) -> None:
        self._send([None, True, None, 0.0])

    def answer(self, call_id: int, result: Any, seconds: float = 0.0) -> None:
        """`seconds` were spent on the call. Raises TypeError when `result` is not made of msgpack's types."""
        self._send([call_id, True, result, seconds])

    def fail(self, call_id: int, error: BaseException, seconds: float = 0.0) -> None:
        self._send([call_id, False, f"{type(error).__name__}: {error}", seconds])

    def _send(self, message: list[Any]) -> None:
        data = memoryview(frame(message))
        with self._writing:
            while data:
                data = data[os.write(self._out, data) :]


def serve_in_order(channel: ParentChannel, handlers: Mapping[str, Callable[[Any], Any]]) -> None:
    """Answer calls one after the other on the main thread (so that handlers may use signals), for ever.

    A second thread reads, so that the process ends with its parent also while a handler hangs.
    """
    calls: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def read() -> None:
        for message in channel.messages():
            calls.put(message)

    threading.Thread(target=read, daemon=True, name="life-line").start()
    channel.ready()
    while True:
        call_id, op, payload = calls.get()
        began = time.perf_counter()
        try:
            result = handlers[op](payload)
            channel.answer(call_id, result, time.perf_counter() - began)
        except Exception as error:
            channel.fail(call_id, error, time.perf_counter() - began)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process with its parent, for code that never lets the life line be read."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
