"""The rollout side of a run: inference engines and the LLM proxy, as the control plane drives them."""

import asyncio
import secrets
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from infra.processes import ServiceProcess
from infra.rpc import RpcClient
from tasks.rollout.config import RolloutConfig
from tasks.trajectory import StopReason

COUNTERS = ("prefill_tokens", "recomputed_tokens", "decode_tokens", "cached_tokens", "steps", "busy_seconds")


@dataclass(slots=True)
class RolloutFleet:
    """A running proxy with its engines. Commands return once every engine has carried them out."""

    processes: list[ServiceProcess]
    proxy_url: str
    token: str
    _client: RpcClient

    @classmethod
    async def start(
        cls,
        config: RolloutConfig,
        *,
        model: Path,
        max_context: int,
        weights_url: str,
        version: int | None,
        logs: Path,
    ) -> "RolloutFleet":
        """Start the engines side by side, then the proxy.

        `version` is a published one to load, or None for the weights of the model directory (version 0).
        Raises `ServiceFailed`; what had started is then stopped.
        """
        token = secrets.token_urlsafe(24)
        engine_settings = {
            "model": str(model),
            "engine": config.engine.model_dump(mode="json"),
            "weights": {"url": weights_url},
            "version": version,
            "max_context": max_context,
            "token": token,
        }
        names = [f"engine-{index}" for index in range(config.engine.workers)]
        started = await asyncio.gather(
            *(
                ServiceProcess.start(
                    name,
                    "tasks.rollout.engines.service",
                    engine_settings,
                    logs / f"{name}.log",
                    environment={"OMP_NUM_THREADS": str(config.engine.threads)},
                )
                for name in names
            ),
            return_exceptions=True,
        )
        engines = [engine for engine in started if isinstance(engine, ServiceProcess)]
        problems = [engine for engine in started if isinstance(engine, BaseException)]
        if problems:
            await asyncio.gather(*(engine.stop() for engine in engines))
            raise problems[0]
        proxy = await ServiceProcess.start(
            "proxy",
            "tasks.rollout.proxy",
            {
                "engines": [{"name": engine.name, "url": engine.url, "token": token} for engine in engines],
                "generate_limit_s": config.generate_limit_s,
                "token": token,
            },
            logs / "proxy.log",
        )
        client = await RpcClient(proxy.url, token=token).connect()
        return cls([*engines, proxy], proxy.url, token, client)

    async def suspend(self) -> None:
        await self._client.call("suspend")

    async def load_weights(self, version: int) -> None:
        await self._client.call("load_weights", {"version": version})

    async def resume(self) -> None:
        await self._client.call("resume")

    async def abort(self, trajectories: list[str], reason: StopReason) -> None:
        await self._client.call("abort", {"trajectories": trajectories, "reason": reason.value})

    async def set_oldest_admissible(self, version: int) -> None:
        await self._client.call("set_oldest_admissible", {"version": version})

    async def recompute(self) -> int:
        """Wait until what was frozen has rebuilt its KV. Returns the tokens recomputed since the resume."""
        return int(await self._client.call("recompute"))

    async def counters(self) -> Counter[str]:
        """What all engines have done since they started: the sums of their `EngineStats`, and `turns`."""
        stats = await self._client.call("stats")
        counters = Counter({"turns": stats["turns"]})
        for engine in stats["engines"].values():
            counters.update({name: value for name, value in engine.items() if name in COUNTERS})
        return counters

    async def stop(self) -> None:
        await self._client.close()
        await asyncio.gather(*(process.stop() for process in self.processes))
