"""A vLLM server's HTTP routes, as the engine uses them."""

import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from infra.rpc import RpcError
from tasks.rollout.engines.vllm.door import PROGRESS, SAMPLED

_ID_PREFIX = "generate-tokens-"  # vLLM puts it before the id that a request names


class VllmClient:
    """Raises `RpcError`: `invalid_request` where vLLM refuses a request, `engine_failed` where it fails."""

    def __init__(self, url: str, token: str):
        self._session = aiohttp.ClientSession(
            url,
            headers={"Authorization": f"Bearer {token}"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )

    async def close(self) -> None:
        await self._session.close()

    async def healthy(self) -> bool:
        """Whether the server is up and its model loaded."""
        try:
            async with self._session.get("/health") as response:
                return response.status == 200
        except aiohttp.ClientConnectorError:
            return False

    async def generate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What `/inference/v1/generate` answers. Cancelling aborts the request."""
        answer: dict[str, Any] = await self._post("/inference/v1/generate", request)
        return answer

    async def abort(self, request_ids: list[str]) -> None:
        """End requests, which answer with what they have. One that has not arrived yet is not ended."""
        await self._post("/abort_requests", {"request_ids": [_ID_PREFIX + each for each in request_ids]})

    async def pause(self) -> None:
        """No token is sampled after this returns; requests and their KV stay."""
        await self._post("/pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        await self._post("/resume")

    async def on_workers(self, method: str, *arguments: str) -> list[dict[str, str]]:
        """Call a method of the worker extension on every worker."""
        answer = await self._post("/collective_rpc", {"method": method, "args": arguments})
        results: list[dict[str, str]] = answer["results"]
        return results

    async def reset_kv(self) -> None:
        """Forget all KV, also of requests in flight, which compute it again when generation goes on."""
        answer = await self._post("/reset_prefix_cache?reset_running_requests=true")
        if not answer["success"]:
            raise RpcError("engine_failed", "vLLM did not give up KV that it keeps from before the update")

    async def set_version(self, version: int) -> None:
        """What tokens sampled from now on are stamped with. Only while paused is that exact."""
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def progress(self) -> dict[str, int]:
        """Tokens sampled so far by each request in flight, by its id."""
        answer = await self._request("GET", PROGRESS)
        return {name.removeprefix(_ID_PREFIX): count for name, count in json.loads(answer).items()}

    async def sampled(self, since: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """What requests in flight have sampled from a token on, by their ids; see `door.SAMPLED`."""
        answer = await self._post(SAMPLED, {_ID_PREFIX + name: start for name, start in since.items()})
        return {name.removeprefix(_ID_PREFIX): sampled for name, sampled in answer.items()}

    async def metrics(self) -> dict[str, float]:
        """vLLM's Prometheus samples by name, summed over labels."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families((await self._request("GET", "/metrics")).decode()):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    async def _post(self, path: str, content: Any = None) -> Any:
        return json.loads(await self._request("POST", path, content))

    async def _request(self, method: str, path: str, content: Any = None) -> bytes:
        try:
            async with self._session.request(method, path, json=content) as response:
                body = await response.read()
        except aiohttp.ClientError as error:
            raise RpcError(
                "engine_failed", f"vLLM does not answer: {type(error).__name__}: {error}"
            ) from error
        if response.status >= 400:
            code = "invalid_request" if response.status < 500 else "engine_failed"
            raise RpcError(code, f"vLLM answered {response.status}: {body.decode(errors='replace')[:2000]}")
        return body
