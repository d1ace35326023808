"""The ends of a WebSocket connection that carries the frames of `infra.rpc`, packed by msgpack."""

import asyncio
from typing import Any

import aiohttp
import msgpack
from aiohttp import web

from infra.rpc_inprocess import Frame, Receiver

_MAX_FRAME_BYTES = 1 << 30


def pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False, strict_map_key=False)


async def _read(socket: web.WebSocketResponse | aiohttp.ClientWebSocketResponse, receiver: Receiver) -> None:
    """Hand on what comes, until the connection is closed."""
    async for message in socket:
        if message.type == aiohttp.WSMsgType.BINARY:
            receiver.receive(unpack(message.data))


class ServerSocket:
    """The server's end."""

    def __init__(self, socket: web.WebSocketResponse):
        self._socket = socket

    @classmethod
    async def accept(cls, request: web.Request) -> "ServerSocket":
        socket = web.WebSocketResponse(max_msg_size=_MAX_FRAME_BYTES, compress=False)
        await socket.prepare(request)
        return cls(socket)

    @property
    def closed(self) -> bool:
        return self._socket.closed

    async def serve(self, receiver: Receiver) -> web.WebSocketResponse:
        """Hand on what comes, until the connection is closed."""
        try:
            await _read(self._socket, receiver)
        finally:
            receiver.ended()
        return self._socket

    async def send(self, frame: Frame) -> None:
        """Raises ConnectionResetError when the connection is closed."""
        await self._socket.send_bytes(pack(frame))

    async def close(self) -> None:
        await self._socket.close(code=aiohttp.WSCloseCode.GOING_AWAY)


class ClientSocket:
    """The client's end."""

    def __init__(
        self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse, receiver: Receiver
    ):
        self._session = session
        self._socket = socket
        self._reader = asyncio.create_task(self._read(receiver))

    @classmethod
    async def connect(
        cls, url: str, token: str | None, receiver: Receiver, timeout_s: float
    ) -> "ClientSocket":
        """Raises OSError, TimeoutError, or `aiohttp.ClientError`."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        session = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(timeout_s):
                socket = await session.ws_connect(
                    f"{url}/rpc", headers=headers, max_msg_size=_MAX_FRAME_BYTES, compress=0
                )
        except BaseException:
            await session.close()
            raise
        return cls(session, socket, receiver)

    async def _read(self, receiver: Receiver) -> None:
        await _read(self._socket, receiver)
        receiver.ended()

    @property
    def closed(self) -> bool:
        return self._socket.closed

    @property
    def local_address(self) -> str | None:
        """This machine's address on the connection."""
        address = self._socket.get_extra_info("sockname")
        return None if address is None else str(address[0])

    async def send(self, frame: Frame) -> None:
        """Raises ConnectionResetError when the connection is closed."""
        await self._socket.send_bytes(pack(frame))

    def drop(self) -> None:
        """Close at once, without a word to the other side. `close` is still to be called."""
        connection = self._socket._response.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()

    async def wait_closed(self) -> None:
        await asyncio.wait({self._reader})

    async def close(self) -> None:
        await self._socket.close()
        await self._reader
        await self._session.close()
