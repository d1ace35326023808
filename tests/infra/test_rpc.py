import asyncio
from contextvars import ContextVar

import pytest

from infra.rpc import ConnectionLost, RpcClient, RpcConnection, RpcError, RpcServer
from infra.virtual_time import run_virtual


async def echo(payload: object, _: RpcConnection) -> object:
    return payload


async def refuse(_: object, __: RpcConnection) -> None:
    raise RpcError("stale", "too old")


async def break_down(_: object, __: RpcConnection) -> None:
    raise KeyError("oops")


@pytest.fixture(params=["127.0.0.1", "inproc"])
def host(request: pytest.FixtureRequest) -> str:
    """A server's, for each transport: over a socket, and within the process."""
    return str(request.param)


async def connected(server: RpcServer, host: str) -> RpcClient:
    return await RpcClient(await server.start(host)).connect()


async def test_many_calls_share_one_connection_and_answers_find_their_callers(host: str) -> None:
    async def later(payload: int, _: RpcConnection) -> int:
        await asyncio.sleep(0.02 * (5 - payload))
        return payload * 10

    server = RpcServer({"later": later})
    client = await connected(server, host)
    assert await asyncio.gather(*(client.call("later", index) for index in range(5))) == [0, 10, 20, 30, 40]
    assert len(server.connections) == 1
    await client.close()
    await server.stop()


async def test_bytes_and_unicode_pass_unchanged(host: str) -> None:
    server = RpcServer({"echo": echo})
    client = await connected(server, host)
    payload = {"tokens": bytes(range(256)), "text": "π", "none": None, "list": [1, 2.5]}
    assert await client.call("echo", payload) == payload
    await client.close()
    await server.stop()


@pytest.mark.parametrize(
    ("method", "code"), [("refuse", "stale"), ("break_down", "internal"), ("missing", "unknown_method")]
)
async def test_errors_arrive_with_their_code_and_the_connection_lives_on(
    method: str, code: str, host: str
) -> None:
    server = RpcServer({"refuse": refuse, "break_down": break_down, "echo": echo})
    client = await connected(server, host)
    with pytest.raises(RpcError) as raised:
        await client.call(method)
    assert raised.value.code == code
    assert await client.call("echo", 1) == 1
    await client.close()
    await server.stop()


@pytest.mark.parametrize("how", ["cancel", "timeout", "disconnect"])
async def test_the_handler_is_cancelled_when_its_caller_goes_away(how: str, host: str) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def forever(_: object, __: RpcConnection) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    server = RpcServer({"forever": forever})
    client = await connected(server, host)
    call = asyncio.create_task(client.call("forever", None, 0.05 if how == "timeout" else None))
    await began.wait()
    if how == "cancel":
        call.cancel()
    if how == "disconnect":
        await client.close()
    with pytest.raises((asyncio.CancelledError, TimeoutError, ConnectionLost)):
        await call
    async with asyncio.timeout(2):
        await ended.wait()
    await client.close()
    await server.stop()


async def test_pending_calls_fail_when_the_server_goes_away(host: str) -> None:
    async def forever(_: object, __: RpcConnection) -> None:
        await asyncio.Event().wait()

    server = RpcServer({"forever": forever})
    client = await connected(server, host)
    call = asyncio.create_task(client.call("forever"))
    await asyncio.sleep(0.05)
    await server.stop()
    with pytest.raises(ConnectionLost):
        await call
    with pytest.raises(ConnectionLost):
        await client.call("forever")
    await client.close()


async def test_notices_reach_every_client(host: str) -> None:
    server = RpcServer({"echo": echo})
    url = await server.start(host)
    heard: list[tuple[str, object]] = []
    clients = [
        await RpcClient(url).connect(on_notice=lambda name, payload: heard.append((name, payload)))
        for _ in range(2)
    ]
    await asyncio.gather(*(client.call("echo", 0) for client in clients))
    await server.broadcast("abort", {"reason": "stale"})
    await asyncio.gather(*(client.call("echo", 0) for client in clients))
    assert heard == [("abort", {"reason": "stale"})] * 2
    for client in clients:
        await client.close()
    await server.stop()


async def test_a_token_is_asked_of_every_connection(host: str) -> None:
    server = RpcServer({"echo": echo}, token="secret")
    url = await server.start(host)
    for token in (None, "wrong"):
        with pytest.raises(ConnectionLost, match="401"):
            await RpcClient(url, token=token).connect()
    client = await RpcClient(url, token="secret").connect()
    assert await client.call("echo", 1) == 1
    await client.close()
    await server.stop()


async def test_it_does_not_leave_loopback_without_a_token() -> None:
    with pytest.raises(ValueError, match="token"):
        await RpcServer({"echo": echo}).start(host="0.0.0.0")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "inproc://9"])
async def test_nobody_there_is_a_lost_connection(url: str) -> None:
    with pytest.raises(ConnectionLost, match="cannot connect"):
        await RpcClient(url).connect(timeout_s=2)
    with pytest.raises(ConnectionLost, match="not connected"):
        await RpcClient(url).call("echo")


async def test_a_dropped_connection_fails_its_calls_and_ends_their_handlers(host: str) -> None:
    began, ended, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def forever(_: object, __: RpcConnection) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    server = RpcServer({"forever": forever}, on_disconnect=lambda _: left.set())
    client = await connected(server, host)
    call = asyncio.create_task(client.call("forever"))
    await began.wait()
    closed = asyncio.create_task(client.wait_closed())
    client.drop()
    async with asyncio.timeout(5):
        with pytest.raises(ConnectionLost):
            await call
        await asyncio.gather(closed, ended.wait(), left.wait())
    assert not client.connected
    assert server.connections == []
    with pytest.raises(ConnectionLost):
        await client.call("forever")
    await client.close()
    await server.stop()


async def test_a_notice_sent_before_an_answer_is_heard_before_it(host: str) -> None:
    heard: list[str] = []

    async def tell(_: object, connection: RpcConnection) -> str:
        await connection.notify("first", None)
        return "second"

    server = RpcServer({"tell": tell})
    client = await RpcClient(await server.start(host)).connect(on_notice=lambda name, _: heard.append(name))
    heard.append(await client.call("tell"))
    assert heard == ["first", "second"]
    await client.close()
    await server.stop()


async def test_a_notice_is_not_heard_within_the_code_that_sends_it(host: str) -> None:
    """What sends notices while it goes through its own state must not see that change under it."""
    heard: list[object] = []

    async def tell(_: object, connection: RpcConnection) -> list[object]:
        await connection.notify("one", 1)
        return list(heard)

    server = RpcServer({"tell": tell})
    client = await RpcClient(await server.start(host)).connect(on_notice=lambda _, one: heard.append(one))
    assert await client.call("tell") == []
    assert heard == [1]
    await client.close()
    await server.stop()


async def test_a_handler_sees_the_context_of_the_server_and_not_of_its_caller(host: str) -> None:
    who: ContextVar[str] = ContextVar("who", default="nobody")

    async def ask(_: object, __: RpcConnection) -> str:
        return who.get()

    async def serve() -> RpcServer:
        who.set("the server")
        server = RpcServer({"ask": ask})
        urls.append(await server.start(host))
        return server

    urls: list[str] = []
    server = await asyncio.create_task(serve())
    client = await RpcClient(urls[0]).connect()
    who.set("the caller")
    assert await client.call("ask") == "the server"
    await client.close()
    await server.stop()


async def test_servers_in_process_are_numbered_by_event_loop_and_unknown_to_others() -> None:
    server = RpcServer({"echo": echo})
    url = await server.start("inproc")

    async def elsewhere() -> str:
        with pytest.raises(ConnectionLost, match="nobody listens"):
            await RpcClient(url).connect()
        return await RpcServer({"echo": echo}).start("inproc")

    assert await asyncio.to_thread(run_virtual, elsewhere()) == url
    client = await RpcClient(url).connect()
    shared = object()
    assert await client.call("echo", shared) is shared  # nothing is packed
    await client.close()
    await server.stop()
    with pytest.raises(ConnectionLost):
        await RpcClient(url).connect()
