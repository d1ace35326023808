"""Multiplexed remote calls over one connection: what the LLM proxy, the engines and the trainer speak.

One connection carries any number of calls at a time, so a turn costs two small frames and no connection
set-up. Frames are arrays, msgpack over a WebSocket (`rpc_sockets`); between services of one process they are
handed over as they are (`rpc_inprocess`), on a server started with the host "inproc":

    call    [id, method, payload]        answer  [id, True, result] or [id, False, [code, message]]
    cancel  [id, None, None]             notice  [None, name, payload]   (server to client, unasked)

A server binds loopback unless it is given a token, which every connection must then present.
"""

import asyncio
import contextvars
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from infra import rpc_inprocess
from infra.rpc_inprocess import Frame
from infra.rpc_sockets import ClientSocket, ServerSocket

logger = logging.getLogger(__name__)

Payload = Any
Handler = Callable[[Payload, "RpcConnection"], Awaitable[Payload]]
LOOPBACK = ("127.0.0.1", "::1", "localhost")
INPROCESS = rpc_inprocess.SCHEME
"""The host that a server is started on for clients of its own event loop only."""


class RpcError(Exception):
    """An error the remote side raised on purpose. `code` is stable and meant for programs."""

    def __init__(self, code: str, message: str):
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class ConnectionLost(RpcError):
    """The connection closed before the answer came; the call may or may not have run."""

    def __init__(self, message: str):
        super().__init__("connection_lost", message)


class RpcConnection:
    """The server's end of one client's connection."""

    def __init__(self, server: "RpcServer", end: ServerSocket | rpc_inprocess.End):
        self._server = server
        self._end = end
        self._running: dict[int, asyncio.Task[None]] = {}

    async def notify(self, name: str, payload: Payload) -> None:
        """Send the client something it did not ask for. A closed connection is not an error here."""
        if not self._end.closed:
            await self._end.send([None, name, payload])

    async def close(self) -> None:
        await self._end.close()

    def receive(self, frame: Frame) -> None:
        """A call, or the end of one. For the connection's end."""
        call_id, method, payload = frame
        if method is None:
            if (task := self._running.get(call_id)) is not None:
                # Cancelled before it has begun, it never forgets itself.
                task.add_done_callback(lambda _: self._running.pop(call_id, None))
                task.cancel()
            return
        self._running[call_id] = self._server.spawn(self._answer(call_id, method, payload))

    def ended(self) -> None:
        """The connection is closed: nobody waits for what runs on it. For the connection's end."""
        for task in list(self._running.values()):
            task.cancel()
        self._server.disconnected(self)

    async def _answer(self, call_id: int, method: str, payload: Payload) -> None:
        try:
            frame = await self._outcome(method, payload, call_id)
            if not self._end.closed:
                await self._end.send(frame)
        finally:
            self._running.pop(call_id, None)

    async def _outcome(self, method: str, payload: Payload, call_id: int) -> Frame:
        """What the handler answers or raises, as a frame."""
        try:
            handler = self._server.handlers.get(method)
            if handler is None:
                raise RpcError("unknown_method", method)
            return [call_id, True, await handler(payload, self)]
        except RpcError as error:
            return [call_id, False, [error.code, error.message]]
        except Exception as error:
            logger.exception("handler %s failed", method)
            return [call_id, False, ["internal", f"{type(error).__name__}: {error}"]]


class RpcServer:
    """Serves named async handlers. `extra_routes` adds plain HTTP routes (metrics, an OpenAI endpoint), which
    a server in process does not serve."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        token: str | None = None,
        on_disconnect: Callable[[RpcConnection], None] | None = None,
        extra_routes: list[web.RouteDef] | None = None,
    ):
        self.handlers = dict(handlers)
        self._token = token
        self._on_disconnect = on_disconnect
        self._extra_routes = extra_routes or []
        self._runner: web.AppRunner | None = None
        self._inprocess_url: str | None = None
        self._context = contextvars.copy_context()
        self._connections: dict[RpcConnection, None] = {}  # in the order in which they came

    @property
    def connections(self) -> list[RpcConnection]:
        return list(self._connections)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen, and return the URL to connect to: in process where `host` is "inproc".

        Raises ValueError when asked to leave loopback without a token.
        """
        # Handlers see the context variables of who serves, wherever a call comes from.
        self._context = contextvars.copy_context()
        if host == INPROCESS:
            self._inprocess_url = rpc_inprocess.listen(self._accept_in_process)
            return self._inprocess_url
        if host not in LOOPBACK and not self._token:
            raise ValueError(f"refusing to listen on {host!r} without a token: set one, or bind 127.0.0.1")
        app = web.Application()
        app.add_routes([web.get("/rpc", self._serve_socket), web.get("/health", self._health)])
        app.add_routes(self._extra_routes)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        bound_port = self._runner.addresses[0][1]
        return f"http://{host}:{bound_port}"

    async def broadcast(self, name: str, payload: Payload) -> None:
        """Notify every connected client."""
        for connection in self.connections:
            await connection.notify(name, payload)

    async def stop(self) -> None:
        """Close every connection, which cancels what runs on it, and stop listening."""
        if self._inprocess_url is not None:
            rpc_inprocess.unlisten(self._inprocess_url)
            self._inprocess_url = None
        await asyncio.gather(*(connection.close() for connection in self.connections))
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def spawn(self, answering: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(answering, context=self._context.copy())

    def disconnected(self, connection: RpcConnection) -> None:
        del self._connections[connection]
        if self._on_disconnect is not None:
            self._on_disconnect(connection)

    def _connected(self, end: ServerSocket | rpc_inprocess.End) -> RpcConnection:
        connection = RpcConnection(self, end)
        self._connections[connection] = None
        return connection

    def _admits(self, authorization: str) -> bool:
        return not self._token or secrets.compare_digest(
            authorization.encode(), f"Bearer {self._token}".encode()
        )

    def _accept_in_process(self, token: str | None, end: rpc_inprocess.End) -> RpcConnection:
        if not self._admits("" if token is None else f"Bearer {token}"):
            raise PermissionError("401, message='missing or wrong bearer token'")
        return self._connected(end)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _serve_socket(self, request: web.Request) -> web.WebSocketResponse:
        if not self._admits(request.headers.get("Authorization", "")):
            raise web.HTTPUnauthorized(text="missing or wrong bearer token")
        socket = await ServerSocket.accept(request)
        return await socket.serve(self._connected(socket))


class RpcClient:
    """One connection to an `RpcServer`. Safe for any number of concurrent calls on one event loop."""

    def __init__(self, url: str, *, token: str | None = None):
        self.url = url
        self._token = token
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[Payload]] = {}
        self._on_notice: Callable[[str, Payload], None] | None = None
        self._end: ClientSocket | rpc_inprocess.End | None = None

    async def connect(
        self, on_notice: Callable[[str, Payload], None] | None = None, timeout_s: float = 30.0
    ) -> "RpcClient":
        """Open the connection. Raises `ConnectionLost` when nobody answers."""
        self._on_notice = on_notice
        try:
            if self.url.startswith(f"{INPROCESS}://"):
                self._end = rpc_inprocess.connect(self.url, self._token, self)
            else:
                self._end = await ClientSocket.connect(self.url, self._token, self, timeout_s)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectionLost(f"cannot connect to {self.url}: {error}") from error
        return self

    @property
    def connected(self) -> bool:
        return self._end is not None and not self._end.closed

    @property
    def local_address(self) -> str:
        """This machine's address on the connection. Raises `ConnectionLost` without one."""
        address = self._end.local_address if self._end is not None else None
        if address is None:
            raise ConnectionLost(f"not connected to {self.url}")
        return address

    async def wait_closed(self) -> None:
        """Return once the connection is closed, by whichever side."""
        if self._end is not None:
            await self._end.wait_closed()

    async def call(self, method: str, payload: Payload = None, timeout_s: float | None = None) -> Payload:
        """Call a remote handler and return its answer.

        Raises `RpcError` with the remote code, `ConnectionLost`, or TimeoutError after `timeout_s`. When the
        caller is cancelled or times out, the remote handler is cancelled too.
        """
        end = self._end
        if end is None or end.closed:
            raise ConnectionLost(f"not connected to {self.url}")
        call_id = next(self._ids)
        future: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = future
        try:
            await end.send([call_id, method, payload])
            if timeout_s is None:
                return await future
            async with asyncio.timeout(timeout_s):
                return await future
        except (asyncio.CancelledError, TimeoutError):
            if not end.closed:
                await end.send([call_id, None, None])
            raise
        except ConnectionResetError as error:
            raise ConnectionLost(f"{self.url}: {error}") from error
        finally:
            self._pending.pop(call_id, None)

    def drop(self) -> None:
        """Give the connection up at once, without a word to a peer that may be frozen.

        Calls under way raise `ConnectionLost`. `close` is still to be called, and then waits for nobody.
        """
        if self._end is not None:
            self._end.drop()

    async def close(self) -> None:
        if self._end is not None:
            await self._end.close()

    def receive(self, frame: Frame) -> None:
        """An answer or a notice. For the connection's end."""
        call_id, status, value = frame
        if call_id is None:
            if self._on_notice is not None:
                self._on_notice(status, value)
            return
        future = self._pending.get(call_id)
        if future is None or future.done():
            return
        if status:
            future.set_result(value)
        else:
            future.set_exception(RpcError(*value))

    def ended(self) -> None:
        """The connection is closed. For the connection's end."""
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ConnectionLost(f"{self.url} closed the connection"))
