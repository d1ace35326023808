"""The middleware before an ASGI application that counts what gets through to it."""

from typing import Any

import pytest

from tasks.rollout.engines.vllm.door import Door


class Inside:
    """Answers every request with 200."""

    def __init__(self) -> None:
        self.entered: list[str] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.entered.append(scope["type"])
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def inside() -> Inside:
    return Inside()


@pytest.fixture
def door(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> Door:
    monkeypatch.setattr(Door, "token", "s3cret", raising=False)
    return Door(inside)


async def ask(door: Door, kind: str, authorization: str | None, **scope: Any) -> list[dict[str, Any]]:
    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await door({"type": kind, "path": "/pause", "headers": headers, **scope}, None, send)
    return sent


WRONG = [
    None,
    "",
    "Bearer",
    "Bearer ",
    "Bearer s3cre",
    "Bearer s3crets",
    "bearer s3cret",
    "s3cret",
    "Basic s3cret",
]


@pytest.mark.parametrize("authorization", WRONG)
async def test_no_request_enters_without_the_token(
    door: Door, inside: Inside, authorization: str | None
) -> None:
    assert (await ask(door, "http", authorization))[0]["status"] == 401
    assert (await ask(door, "http", authorization, method="OPTIONS"))[0]["status"] == 401
    assert (await ask(door, "websocket", authorization))[0]["type"] == "websocket.close"
    assert inside.entered == []


async def test_with_the_token_all_enter(door: Door, inside: Inside) -> None:
    assert (await ask(door, "http", "Bearer s3cret"))[0]["status"] == 200
    await ask(door, "websocket", "Bearer s3cret")
    assert inside.entered == ["http", "websocket"]


async def test_the_application_starts_and_stops_without_one(door: Door, inside: Inside) -> None:
    await door({"type": "lifespan"}, None, None)
    assert inside.entered == ["lifespan"]
