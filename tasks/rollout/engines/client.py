"""An inference engine in another process, behind `InferenceEngine`."""

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infra.rpc import RpcClient
from tasks.rollout.engines.base import EngineStats, GenerateRequest, Generation, HeldKv
from tasks.trajectory import StopReason


class RemoteEngine:
    """`InferenceEngine` over a connected `RpcClient`; errors of the engine arrive as `RpcError`."""

    def __init__(self, client: RpcClient):
        self._client = client

    async def generate(self, request: GenerateRequest) -> Generation:
        answer = await self._client.call(
            "generate",
            {
                "session": request.session,
                "tokens": request.tokens.astype("<i4").tobytes(),
                "max_new_tokens": request.max_new_tokens,
                "temperature": request.temperature,
                "seed": request.seed,
                "sampled_before": request.sampled_before,
                "kv": asdict(request.kv) if request.kv is not None else None,
            },
        )
        return Generation(
            tokens=np.frombuffer(answer["tokens"], "<i4"),
            logprobs=np.frombuffer(answer["logprobs"], "<f4"),
            versions=np.frombuffer(answer["versions"], "<i4"),
            stop=StopReason(answer["stop"]),
        )

    async def prefill(self, session: str, tokens: NDArray[np.int32]) -> HeldKv:
        answer = await self._client.call(
            "prefill", {"session": session, "tokens": tokens.astype("<i4").tobytes()}
        )
        return HeldKv(**answer)

    async def export_kv(self, key: str, start: int, count: int) -> dict[str, Any]:
        block: dict[str, Any] = await self._client.call(
            "export_kv", {"key": key, "start": start, "count": count}
        )
        return block

    async def abort(self, sessions: list[str], reason: StopReason) -> None:
        await self._client.call("abort", {"sessions": sessions, "reason": reason.value})

    async def end_session(self, session: str) -> None:
        await self._client.call("end_session", {"session": session})

    async def suspend(self) -> None:
        await self._client.call("suspend")

    async def load_weights(self, version: int) -> None:
        await self._client.call("load_weights", {"version": version})

    async def resume(self) -> None:
        await self._client.call("resume")

    async def recompute(self) -> int:
        return int(await self._client.call("recompute"))

    async def stats(self) -> EngineStats:
        return EngineStats(**await self._client.call("stats"))
