"""Connections between services of one process on one event loop, without sockets and without packing.

What the servers and clients of `infra.rpc` speak over a WebSocket they speak over these as well, which is how
a whole run lives in one process in simulation. Frames are handed over as they are: neither side may write to
what it has sent or got.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

SCHEME = "inproc"
Frame = list[Any]


class Receiver(Protocol):
    """What is behind one end of a connection."""

    def receive(self, frame: Frame) -> None: ...

    def ended(self) -> None:
        """The connection is closed, by whichever side. Comes once, after everything that was received."""


class End:
    """One end of a connection: what is sent here is received behind the other end, in order."""

    __slots__ = ("_gone", "_loop", "_peer", "_receiver", "closed")

    def __init__(self) -> None:
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._gone = self._loop.create_future()
        self._peer: End
        self._receiver: Receiver

    @classmethod
    def pair(cls) -> tuple["End", "End"]:
        first, second = cls(), cls()
        first._peer, second._peer = second, first
        return first, second

    def attach(self, receiver: Receiver) -> None:
        """Before anything is sent from the other end."""
        self._receiver = receiver

    @property
    def local_address(self) -> str:
        return "127.0.0.1"

    async def send(self, frame: Frame) -> None:
        """Raises ConnectionResetError when the connection is closed."""
        if self.closed:
            raise ConnectionResetError("the connection is closed")
        if frame[0] is None:
            # A notice runs its hearer's code, which must not happen within the sender's.
            self._loop.call_soon(self._peer._hear, frame)
        else:
            self._peer._receiver.receive(frame)

    def _hear(self, frame: Frame) -> None:
        if not self.closed:
            self._receiver.receive(frame)

    def drop(self) -> None:
        """Close both ends at once."""
        for end in (self, self._peer):
            if not end.closed:
                end.closed = True
                self._loop.call_soon(end._end)

    def _end(self) -> None:
        self._gone.set_result(None)
        self._receiver.ended()

    async def close(self) -> None:
        """Close both ends, and return once this side knows."""
        self.drop()
        await self.wait_closed()

    async def wait_closed(self) -> None:
        await asyncio.wait({self._gone})


Accept = Callable[[str | None, End], Receiver]
"""(token presented, the server's end) -> what is behind it. Raises PermissionError for a wrong token."""


class _Listeners:
    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.by_url: dict[str, Accept] = {}


_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Listeners] = WeakKeyDictionary()


def listen(accept: Accept) -> str:
    """Take connections on the running loop, until `unlisten`. Returns the URL to connect to there."""
    listeners = _of_loop.setdefault(asyncio.get_running_loop(), _Listeners())
    url = f"{SCHEME}://{next(listeners.numbers)}"
    listeners.by_url[url] = accept
    return url


def unlisten(url: str) -> None:
    _of_loop[asyncio.get_running_loop()].by_url.pop(url, None)


def connect(url: str, token: str | None, receiver: Receiver) -> End:
    """Raises ConnectionRefusedError where nobody listens, PermissionError for a wrong token."""
    listeners = _of_loop.get(asyncio.get_running_loop())
    accept = None if listeners is None else listeners.by_url.get(url)
    if accept is None:
        raise ConnectionRefusedError(f"nobody listens at {url} on this event loop")
    ours, theirs = End.pair()
    ours.attach(receiver)
    theirs.attach(accept(token, theirs))
    return ours
