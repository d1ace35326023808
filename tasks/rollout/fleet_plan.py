"""Where and how the rollout side's processes start: once, and again when one is lost."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.launcher import Launcher, Service
from tasks.rollout.config import RolloutConfig
from tasks.rollout.routing import WorkerRole
from tasks.rollout.workers import EngineAddress


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """How the fleet's processes are started, now and again."""

    config: RolloutConfig
    launcher: Launcher
    engine: Mapping[str, Any]  # settings of the engine service
    proxy: Mapping[str, Any]  # settings of the proxy service that do not change
    proxy_pool: str
    places: Mapping[str, tuple[str, WorkerRole]]  # pool and role by engine
    logs: Path
    token: str

    async def start_engine(self, name: str, version: int | None) -> Service:
        """With the weights of a published version, or of the model directory as version 0."""
        pool, role = self.places[name]
        return await self.launcher.start(
            pool,
            name,
            "tasks.rollout.engines.service",
            {**self.engine, "version": version, "token": self.token, "role": role},
            self.logs / f"{name}.log",
            environment={"OMP_NUM_THREADS": str(self.config.engine.threads)},
            start_limit_s=self.config.engine.start_limit_s,
        )

    async def start_proxy(self, engines: Mapping[str, Service], **more: Any) -> Service:
        settings = {
            **self.proxy,
            "engines": [self.address(name, engine) for name, engine in engines.items()],
            "token": self.token,
            **more,
        }
        return await self.launcher.start(
            self.proxy_pool, "proxy", "tasks.rollout.proxy_service", settings, self.logs / "proxy.log"
        )

    def address(self, name: str, engine: Service) -> dict[str, Any]:
        pool, role = self.places[name]
        return asdict(EngineAddress(name, engine.url, self.token, pool, role))


def place_engines(
    roles: Sequence[WorkerRole], rollout: Sequence[str], prefill: Sequence[str]
) -> dict[str, tuple[str, WorkerRole]]:
    """Pool and role of each engine: prefill workers over their pools, the others over the rollout's."""
    places: dict[str, tuple[str, WorkerRole]] = {}
    placed = {"prefill": 0, "rollout": 0}
    for index, role in enumerate(roles):
        pools, kind = (prefill, "prefill") if role == "prefill" else (rollout, "rollout")
        places[f"engine-{index}"] = (pools[placed[kind] % len(pools)], role)
        placed[kind] += 1
    return places
