"""Multiplexed remote calls over one WebSocket: what the LLM proxy, the engines and the trainer speak.

One connection carries any number of calls at a time, so a turn costs two small frames and no connection
set-up. Frames are msgpack arrays:

    call    [id, method, payload]        answer  [id, True, result] or [id, False, [code, message]]
    cancel  [id, None, None]             notice  [None, name, payload]   (server to client, unasked)

A server binds loopback unless it is given a token, which every connection must then present.
"""

import asyncio
import functools
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import msgpack
from aiohttp import web

logger = logging.getLogger(__name__)

Payload = Any
Handler = Callable[[Payload, "RpcConnection"], Awaitable[Payload]]
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_MAX_FRAME_BYTES = 1 << 30


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


def pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False, strict_map_key=False)


def _forget(running: dict[int, asyncio.Task[None]], call_id: int, _: asyncio.Task[None]) -> None:
    running.pop(call_id, None)


class RpcConnection:
    """The server's end of one client's connection."""

    def __init__(self, socket: web.WebSocketResponse):
        self._socket = socket

    async def notify(self, name: str, payload: Payload) -> None:
        """Send the client something it did not ask for. A closed connection is not an error here."""
        if not self._socket.closed:
            await self._socket.send_bytes(pack([None, name, payload]))

    async def close(self) -> None:
        await self._socket.close(code=aiohttp.WSCloseCode.GOING_AWAY)


class RpcServer:
    """Serves named async handlers. `extra_routes` adds plain HTTP routes (metrics, an OpenAI endpoint)."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        token: str | None = None,
        on_disconnect: Callable[[RpcConnection], None] | None = None,
        extra_routes: list[web.RouteDef] | None = None,
    ):
        self._handlers = dict(handlers)
        self._token = token
        self._on_disconnect = on_disconnect
        self._app = web.Application()
        self._app.add_routes([web.get("/rpc", self._serve_socket), web.get("/health", self._health)])
        self._app.add_routes(extra_routes or [])
        self._runner: web.AppRunner | None = None
        self.connections: set[RpcConnection] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen, and return the URL to connect to.

        Raises ValueError when asked to leave loopback without a token.
        """
        if host not in LOOPBACK and not self._token:
            raise ValueError(f"refusing to listen on {host!r} without a token: set one, or bind 127.0.0.1")
        self._runner = web.AppRunner(self._app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        bound_port = self._runner.addresses[0][1]
        return f"http://{host}:{bound_port}"

    async def broadcast(self, name: str, payload: Payload) -> None:
        """Notify every connected client."""
        for connection in list(self.connections):
            await connection.notify(name, payload)

    async def stop(self) -> None:
        """Close every connection, which cancels what runs on it, and stop listening."""
        if self._runner is not None:
            await asyncio.gather(*(connection.close() for connection in list(self.connections)))
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _serve_socket(self, request: web.Request) -> web.WebSocketResponse:
        given = request.headers.get("Authorization", "").encode()
        if self._token and not secrets.compare_digest(given, f"Bearer {self._token}".encode()):
            raise web.HTTPUnauthorized(text="missing or wrong bearer token")
        socket = web.WebSocketResponse(max_msg_size=_MAX_FRAME_BYTES, compress=False)
        await socket.prepare(request)
        connection = RpcConnection(socket)
        self.connections.add(connection)
        running: dict[int, asyncio.Task[None]] = {}
        try:
            async for message in socket:
                if message.type != aiohttp.WSMsgType.BINARY:
                    continue
                call_id, method, payload = unpack(message.data)
                if method is None:
                    if call_id in running:
                        running[call_id].cancel()
                    continue
                task = asyncio.create_task(self._answer(socket, connection, call_id, method, payload))
                running[call_id] = task
                task.add_done_callback(functools.partial(_forget, running, call_id))
        finally:
            self.connections.discard(connection)
            for task in list(running.values()):
                task.cancel()
            if self._on_disconnect is not None:
                self._on_disconnect(connection)
        return socket

    async def _answer(
        self,
        socket: web.WebSocketResponse,
        connection: RpcConnection,
        call_id: int,
        method: str,
        payload: Payload,
    ) -> None:
        try:
            handler = self._handlers.get(method)
            if handler is None:
                raise RpcError("unknown_method", method)
            frame = [call_id, True, await handler(payload, connection)]
        except RpcError as error:
            frame = [call_id, False, [error.code, error.message]]
        except Exception as error:
            logger.exception("handler %s failed", method)
            frame = [call_id, False, ["internal", f"{type(error).__name__}: {error}"]]
        if not socket.closed:
            await socket.send_bytes(pack(frame))


class RpcClient:
    """One connection to an `RpcServer`. Safe for any number of concurrent calls on one event loop."""

    def __init__(self, url: str, *, token: str | None = None):
        self.url = url
        self._token = token
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[Payload]] = {}
        self._on_notice: Callable[[str, Payload], None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None

    async def connect(
        self, on_notice: Callable[[str, Payload], None] | None = None, timeout_s: float = 30.0
    ) -> "RpcClient":
        """Open the connection. Raises `ConnectionLost` when nobody answers."""
        self._on_notice = on_notice
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        self._session = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(timeout_s):
                self._socket = await self._session.ws_connect(
                    f"{self.url}/rpc", headers=headers, max_msg_size=_MAX_FRAME_BYTES, compress=0
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await self._session.close()
            raise ConnectionLost(f"cannot connect to {self.url}: {error}") from error
        self._reader = asyncio.create_task(self._read(self._socket))
        return self

    @property
    def connected(self) -> bool:
        return self._socket is not None and not self._socket.closed

    @property
    def local_address(self) -> str:
        """This machine's address on the connection. Raises `ConnectionLost` without one."""
        address = self._socket.get_extra_info("sockname") if self._socket is not None else None
        if address is None:
            raise ConnectionLost(f"not connected to {self.url}")
        return str(address[0])

    async def wait_closed(self) -> None:
        """Return once the connection is closed, by whichever side."""
        if self._reader is not None:
            await asyncio.wait({self._reader})

    async def call(self, method: str, payload: Payload = None, timeout_s: float | None = None) -> Payload:
        """Call a remote handler and return its answer.

        Raises `RpcError` with the remote code, `ConnectionLost`, or TimeoutError after `timeout_s`. When the
        caller is cancelled or times out, the remote handler is cancelled too.
        """
        socket = self._socket
        if socket is None or socket.closed:
            raise ConnectionLost(f"not connected to {self.url}")
        call_id = next(self._ids)
        future: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = future
        try:
            await socket.send_bytes(pack([call_id, method, payload]))
            if timeout_s is None:
                return await future
            async with asyncio.timeout(timeout_s):
                return await future
        except (asyncio.CancelledError, TimeoutError):
            if not socket.closed:
                await socket.send_bytes(pack([call_id, None, None]))
            raise
        except ConnectionResetError as error:
            raise ConnectionLost(f"{self.url}: {error}") from error
        finally:
            self._pending.pop(call_id, None)

    def drop(self) -> None:
        """Give the connection up at once, without a word to a peer that may be frozen.

        Calls under way raise `ConnectionLost`. `close` is still to be called, and then waits for nobody.
        """
        connection = self._socket._response.connection if self._socket is not None else None
        if connection is not None and connection.transport is not None:
            connection.transport.abort()

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._reader is not None:
            await self._reader
        if self._session is not None:
            await self._session.close()

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            if message.type != aiohttp.WSMsgType.BINARY:
                continue
            call_id, status, value = unpack(message.data)
            if call_id is None:
                if self._on_notice is not None:
                    self._on_notice(status, value)
                continue
            future = self._pending.get(call_id)
            if future is None or future.done():
                continue
            if status:
                future.set_result(value)
            else:
                future.set_exception(RpcError(*value))
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ConnectionLost(f"{self.url} closed the connection"))
