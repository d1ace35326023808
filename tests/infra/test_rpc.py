import asyncio

import pytest

from infra.rpc import ConnectionLost, RpcClient, RpcConnection, RpcError, RpcServer


async def echo(payload: object, _: RpcConnection) -> object:
    return payload


async def refuse(_: object, __: RpcConnection) -> None:
    raise RpcError("stale", "too old")


async def break_down(_: object, __: RpcConnection) -> None:
    raise KeyError("oops")


async def connected(server: RpcServer) -> RpcClient:
    return await RpcClient(await server.start()).connect()


async def test_many_calls_share_one_connection_and_answers_find_their_callers() -> None:
    async def later(payload: int, _: RpcConnection) -> int:
        await asyncio.sleep(0.02 * (5 - payload))
        return payload * 10

    server = RpcServer({"later": later})
    client = await connected(server)
    assert await asyncio.gather(*(client.call("later", index) for index in range(5))) == [0, 10, 20, 30, 40]
    assert len(server.connections) == 1
    await client.close()
    await server.stop()


async def test_bytes_and_unicode_pass_unchanged() -> None:
    server = RpcServer({"echo": echo})
    client = await connected(server)
    payload = {"tokens": bytes(range(256)), "text": "π", "none": None, "list": [1, 2.5]}
    assert await client.call("echo", payload) == payload
    await client.close()
    await server.stop()


@pytest.mark.parametrize(
    ("method", "code"), [("refuse", "stale"), ("break_down", "internal"), ("missing", "unknown_method")]
)
async def test_errors_arrive_with_their_code_and_the_connection_lives_on(method: str, code: str) -> None:
    server = RpcServer({"refuse": refuse, "break_down": break_down, "echo": echo})
    client = await connected(server)
    with pytest.raises(RpcError) as raised:
        await client.call(method)
    assert raised.value.code == code
    assert await client.call("echo", 1) == 1
    await client.close()
    await server.stop()


@pytest.mark.parametrize("how", ["cancel", "timeout", "disconnect"])
async def test_the_handler_is_cancelled_when_its_caller_goes_away(how: str) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def forever(_: object, __: RpcConnection) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    server = RpcServer({"forever": forever})
    client = await connected(server)
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


async def test_pending_calls_fail_when_the_server_goes_away() -> None:
    async def forever(_: object, __: RpcConnection) -> None:
        await asyncio.Event().wait()

    server = RpcServer({"forever": forever})
    client = await connected(server)
    call = asyncio.create_task(client.call("forever"))
    await asyncio.sleep(0.05)
    await server.stop()
    with pytest.raises(ConnectionLost):
        await call
    with pytest.raises(ConnectionLost):
        await client.call("forever")
    await client.close()


async def test_notices_reach_every_client() -> None:
    server = RpcServer({"echo": echo})
    url = await server.start()
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


async def test_a_token_is_asked_of_every_connection() -> None:
    server = RpcServer({"echo": echo}, token="secret")
    url = await server.start()
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


async def test_nobody_there_is_a_lost_connection() -> None:
    with pytest.raises(ConnectionLost, match="cannot connect"):
        await RpcClient("http://127.0.0.1:9").connect(timeout_s=2)
