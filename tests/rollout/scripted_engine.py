"""An engine on the wire that does what the test says, and records every command."""

import asyncio
from collections.abc import Iterable
from typing import Any

import numpy as np

from infra.rpc import RpcConnection, RpcError, RpcServer


class ScriptedEngine:
    def __init__(self, version: int = 0, extra: Iterable[str] = ()) -> None:
        self.version = version
        self.commands: list[tuple[str, Any]] = []
        self.let = asyncio.Event()
        self.let.set()
        self.obeys = asyncio.Event()  # commands end
        self.obeys.set()
        self.beats = asyncio.Event()  # heart-beats are answered
        self.beats.set()
        self.refuses_weights = False
        self.fails_with: RpcError | None = None
        self.busy_sessions: set[str] = set()
        methods = ("abort", "end_sessions", "suspend", "resume", "load_weights", "stats", "recompute", *extra)
        self.server = RpcServer(
            {"generate": self.generate, "ping": self.ping, **{name: self._record(name) for name in methods}}
        )
        self._asking: dict[str, RpcConnection] = {}

    def _record(self, name: str) -> Any:
        async def handler(payload: Any, _: RpcConnection) -> Any:
            self.commands.append((name, payload))
            await self.obeys.wait()
            if name == "load_weights":
                if self.refuses_weights:
                    raise RpcError("weights_rejected", "truncated bucket")
                self.version = payload["version"]
            if name == "abort":
                self.busy_sessions.difference_update(payload["sessions"])
            return {"stats": {"version": self.version}, "recompute": 3}.get(name)

        return handler

    async def ping(self, _: Any, __: RpcConnection) -> None:
        await self.beats.wait()

    async def generate(self, payload: Any, connection: RpcConnection) -> dict[str, Any]:
        self.commands.append(("generate", payload))
        if self.fails_with is not None:
            raise self.fails_with
        if payload["session"] in self.busy_sessions:
            raise RpcError("session_busy", "it has a request already")
        self._asking[payload["session"]] = connection
        await self.let.wait()
        return {"tokens": payload["tokens"], "logprobs": b"", "versions": b"", "stop": "stop"}

    async def report(self, session: str, tokens: list[int]) -> None:
        """Say that the session's turn has sampled these so far, its first ones."""
        count = len(tokens)
        await self._asking[session].notify(
            "sampled",
            {
                "session": session,
                "start": 0,
                "tokens": np.array(tokens, "<i4").tobytes(),
                "logprobs": np.full(count, -1.0, "<f4").tobytes(),
                "versions": np.full(count, self.version, "<i4").tobytes(),
            },
        )

    def count(self, name: str) -> int:
        return sum(1 for command, _ in self.commands if command == name)

    def last(self, name: str) -> Any:
        return [payload for command, payload in self.commands if command == name][-1]
