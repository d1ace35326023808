"""The rollout side of a run: inference engines and the LLM proxy, as the control plane drives them."""

import asyncio
import secrets
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from infra.launcher import Launcher, Service
from tasks.rollout.config import RolloutConfig
from tasks.trajectory import StopReason

COUNTERS = ("prefill_tokens", "recomputed_tokens", "decode_tokens", "cached_tokens", "steps", "busy_seconds")


@dataclass(slots=True)
class RolloutFleet:
    """A running proxy with its engines. Commands return once every engine has carried them out."""

    engines: list[Service]
    proxy: Service
    token: str

    @property
    def proxy_url(self) -> str:
        return self.proxy.url

    @classmethod
    async def start(
        cls,
        config: RolloutConfig,
        launcher: Launcher,
        *,
        model: Path,
        max_context: int,
        weights_url: str,
        version: int | None,
        logs: Path,
    ) -> "RolloutFleet":
        """Start the engines, spread over the rollout pools, then the proxy on the first of these.

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
        pools = launcher.pools("rollout")
        placed = {f"engine-{index}": pools[index % len(pools)] for index in range(config.engine.workers)}
        started = await asyncio.gather(
            *(
                launcher.start(
                    pool,
                    name,
                    "tasks.rollout.engines.service",
                    engine_settings,
                    logs / f"{name}.log",
                    environment={"OMP_NUM_THREADS": str(config.engine.threads)},
                    start_limit_s=config.engine.start_limit_s,
                )
                for name, pool in placed.items()
            ),
            return_exceptions=True,
        )
        engines = [engine for engine in started if not isinstance(engine, BaseException)]
        problems = [engine for engine in started if isinstance(engine, BaseException)]
        try:
            if problems:
                raise problems[0]
            proxy = await launcher.start(
                pools[0],
                "proxy",
                "tasks.rollout.proxy_service",
                {
                    "engines": [
                        {"name": engine.name, "url": engine.url, "token": token, "pool": placed[engine.name]}
                        for engine in engines
                    ],
                    "generate_limit_s": config.generate_limit_s,
                    "token": token,
                },
                logs / "proxy.log",
            )
        except BaseException:
            await asyncio.gather(*(engine.stop() for engine in engines))
            raise
        return cls(engines, proxy, token)

    async def suspend(self, *, stage: str | None = None) -> None:
        """`stage` names the task run that a pool host makes of the command."""
        await self.proxy.call("suspend", stage=stage)

    async def load_weights(self, version: int, *, stage: str | None = None) -> None:
        await self.proxy.call("load_weights", {"version": version}, stage=stage)

    async def resume(self, *, stage: str | None = None) -> None:
        await self.proxy.call("resume", stage=stage)

    async def abort(self, trajectories: list[str], reason: StopReason) -> None:
        await self.proxy.call("abort", {"trajectories": trajectories, "reason": reason.value})

    async def set_oldest_admissible(self, version: int) -> None:
        await self.proxy.call("set_oldest_admissible", {"version": version})

    async def recompute(self, *, stage: str | None = None) -> int:
        """Wait until what was frozen has rebuilt its KV. Returns the tokens recomputed since the resume."""
        return int(await self.proxy.call("recompute", stage=stage))

    async def counters(self) -> Counter[str]:
        """What all engines have done since they started: the sums of their `EngineStats`, and `turns`."""
        stats = await self.proxy.call("stats")
        counters = Counter({"turns": stats["turns"]})
        for engine in stats["engines"].values():
            counters.update({name: value for name, value in engine.items() if name in COUNTERS})
        return counters

    async def stop(self) -> None:
        await asyncio.gather(*(service.stop() for service in [*self.engines, self.proxy]))
