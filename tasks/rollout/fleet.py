"""The rollout side of a run: inference engines and the LLM proxy, as the control plane drives them."""

import asyncio
import logging
import secrets
import urllib.parse
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infra.launcher import Launcher, Service
from infra.rpc import RpcError
from tasks.rollout.config import RolloutConfig
from tasks.rollout.fleet_plan import FleetPlan, place_engines
from tasks.rollout.proxy_service import ProxyState
from tasks.rollout.recovery import Recovery, RolloutLost
from tasks.rollout.worker_life import RestartBudget, WorkerPhase
from tasks.rollout.workers import WorkerLimits
from tasks.trajectory import StopReason

logger = logging.getLogger(__name__)

COUNTERS = (
    "prefill_tokens",
    "recomputed_tokens",
    "decode_tokens",
    "cached_tokens",
    "steps",
    "busy_seconds",
    "kv_exported_tokens",
    "kv_imported_tokens",
)
_ABORTED_KEPT = 10_000


class RolloutFleet:
    """A running proxy with its engines. Commands return once every engine has carried them out.

    Engines and the proxy are started again when they are lost; a command that the proxy's loss interrupts is
    given again to the next one. Once nothing is left to restart, commands raise `RolloutLost`. Made by
    `start`.
    """

    def __init__(self, plan: FleetPlan, engines: dict[str, Service], proxy: Service, version: int | None):
        config = plan.config
        self.proxy = proxy
        self.token = plan.token
        self._plan = plan
        self._engines = engines
        self._version = version  # served; None for the weights of the model directory
        self._suspended = False
        self._oldest_admissible = 0
        self._last_stats: dict[str, Any] = {"turns": 0, "past": {}}
        self._past: Counter[str] = Counter()  # of proxies before this one, and the engines they lost
        self._affinity: Mapping[str, str] | None = plan.proxy["affinity"]
        self._aborted: OrderedDict[str, StopReason] = OrderedDict()
        self._recovery = Recovery(
            self,
            heartbeat_limit_s=config.heartbeat_limit_s,
            proxy_budget=RestartBudget(config.worker_restarts, config.restart_window_s),
            lockstep=plan.proxy["lockstep"],
        )
        self._recovering = asyncio.create_task(self._recovery.run(), name="rollout-recovery")

    @property
    def engines(self) -> list[Service]:
        return list(self._engines.values())

    async def serving_pools(self) -> list[str]:
        """The pool of each engine that generates now."""
        phases = (await self.tell_proxy("stats"))["workers"]
        return [
            pool
            for name, (pool, role) in self._plan.places.items()
            if role != "prefill" and WorkerPhase(phases[name]).serves
        ]

    async def served(self) -> dict[str, dict[str, int]]:
        """Turns dispatched since the proxy started: of each domain, to each pool."""
        served: dict[str, dict[str, int]] = (await self.tell_proxy("stats"))["served"]
        return served

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
        affinity: Mapping[str, str] | None = None,
        fall_backs: Mapping[str, Sequence[str]] | None = None,
        lockstep: bool = False,
    ) -> "RolloutFleet":
        """Start the engines, spread over the rollout pools, then the proxy on the first of these.

        `version` is a published one to load, or None for the weights of the model directory (version 0).
        `affinity` and `fall_backs` are the router's, `lockstep` the mode's. Raises `ServiceFailed`; what had
        started is then stopped.
        """
        pools = launcher.pools("rollout")
        plan = FleetPlan(
            config=config,
            launcher=launcher,
            engine={
                "model": str(model),
                "engine": config.engine.model_dump(mode="json"),
                "weights": {"url": weights_url},
                "max_context": max_context,
                "progress_every_s": config.progress_every_s,
            },
            proxy={
                "generate_limit_s": config.generate_limit_s,
                "affinity": dict(affinity) if affinity else None,
                "fall_backs": {pool: list(others) for pool, others in (fall_backs or {}).items()},
                "lockstep": lockstep,
                "min_prefill_tokens": config.min_prefill_tokens,
                "limits": asdict(
                    WorkerLimits(
                        heartbeat_s=config.heartbeat_limit_s,
                        command_s=config.update_limit_s,
                        restarts=config.worker_restarts,
                        restart_window_s=config.restart_window_s,
                    )
                ),
            },
            proxy_pool=pools[0],
            places=place_engines(config.worker_roles, pools, launcher.pools("prefill")),
            logs=logs,
            token=secrets.token_urlsafe(24),
        )
        started = await asyncio.gather(
            *(plan.start_engine(name, version) for name in plan.places), return_exceptions=True
        )
        engines = [engine for engine in started if not isinstance(engine, BaseException)]
        problems = [engine for engine in started if isinstance(engine, BaseException)]
        try:
            if problems:
                raise problems[0]
            by_name = dict(zip(plan.places, engines, strict=True))
            proxy = await plan.start_proxy(by_name, first=True, state=asdict(ProxyState(version or 0)))
        except BaseException:
            await asyncio.gather(*(engine.stop() for engine in engines))
            raise
        return cls(plan, by_name, proxy, version)

    async def suspend(self, *, stage: str | None = None) -> None:
        """`stage` names the task run that a pool host makes of the command."""
        self._suspended = True
        await self.tell_proxy("suspend", stage=stage)

    async def prefetch(self, version: int) -> None:
        """Have the engines pull a published version while they go on generating."""
        await self.tell_proxy("prefetch", {"version": version})

    async def load_weights(self, version: int, *, stage: str | None = None) -> None:
        await self.tell_proxy("load_weights", {"version": version}, stage=stage)
        self._version = version

    async def resume(self, *, stage: str | None = None) -> None:
        await self.tell_proxy("resume", stage=stage)
        self._suspended = False

    async def abort(self, trajectories: list[str], reason: StopReason) -> None:
        self._aborted.update(dict.fromkeys(trajectories, reason))
        while len(self._aborted) > _ABORTED_KEPT:
            self._aborted.popitem(last=False)
        await self.tell_proxy("abort", {"trajectories": trajectories, "reason": reason.value})

    async def expect(self, trajectories: list[str]) -> None:
        """In lockstep modes: these will ask for turns, and rounds wait for them."""
        await self.tell_proxy("expect", {"trajectories": trajectories})

    async def finish(self, trajectories: list[str]) -> None:
        """These trajectories are over, as far as the control plane knows."""
        await self.tell_proxy("finish", {"trajectories": trajectories})

    async def set_oldest_admissible(self, version: int) -> None:
        self._oldest_admissible = version
        await self.tell_proxy("set_oldest_admissible", {"version": version})

    async def rebind(self, affinity: Mapping[str, str]) -> None:
        """Domains prefer these pools from now on."""
        self._affinity = dict(affinity)
        await self.tell_proxy("rebind", {"affinity": self._affinity})

    async def recompute(self, *, stage: str | None = None) -> int:
        """Wait until what was frozen has rebuilt its KV. Returns the tokens recomputed since the resume."""
        return int(await self.tell_proxy("recompute", stage=stage))

    async def counters(self) -> Counter[str]:
        """What all engines have done since they started: the sums of their `EngineStats`, and `turns`.

        Of engines and proxies that were lost, what they had done when last asked.
        """
        stats = self._last_stats = await self.tell_proxy("stats")
        counters = Counter({"turns": stats["turns"] + self._past["turns"]})
        for engine in [*stats["engines"].values(), stats["past"], self._past]:
            counters.update({name: value for name, value in engine.items() if name in COUNTERS})
        return counters

    async def wait_failed(self) -> str:
        """Return why, once nothing generates any more and nothing is started again."""
        await asyncio.wait({self._recovering})
        if self._recovering.cancelled():
            return "it was stopped"
        error = self._recovering.exception()
        return error.message if isinstance(error, RolloutLost) else f"{type(error).__name__}: {error}"

    async def stop(self) -> None:
        self._recovering.cancel()
        await asyncio.gather(self._recovering, return_exceptions=True)
        await asyncio.gather(*(service.stop() for service in [*self._engines.values(), self.proxy]))

    async def tell_proxy(self, method: str, payload: Any = None, *, stage: str | None = None) -> Any:
        """Call the proxy; again, if it was lost and has been started again. Raises `RpcError`."""
        while True:
            await self._recovery.proxy_up(self._recovering)
            proxy = self.proxy
            try:
                return await proxy.call(method, payload, stage=stage)
            except RpcError as error:
                if error.code != "connection_lost":
                    raise
                self._recovery.proxy_lost(proxy)

    async def stop_engine(self, name: str) -> None:
        """For the recovery."""
        await self._engines.pop(name).stop()

    async def restart_engine(self, name: str) -> None:
        """For the recovery. Raises what the launcher does, or `RpcError` when the engine does not join."""
        await self._engines[name].stop()
        engine = await self._plan.start_engine(name, self._version)
        self._engines[name] = engine
        await self.tell_proxy("join", self._plan.address(name, engine))
        logger.info("inference worker %s serves again", name)

    async def restart_proxy(self) -> None:
        """For the recovery. The address stays: environments find the new proxy by themselves."""
        await self.proxy.stop()
        past, self._last_stats = self._last_stats, {"turns": 0, "past": {}}
        self._past.update({"turns": past["turns"], **past["past"]})
        state = ProxyState(
            version=self._version or 0,
            suspended=self._suspended,
            oldest_admissible=self._oldest_admissible,
            aborted={name: reason.value for name, reason in self._aborted.items()},
            restarting=sorted(self._recovery.restarting),
        )
        port = urllib.parse.urlsplit(self.proxy.url).port
        self.proxy = await self._plan.start_proxy(
            self._engines, port=port, state=asdict(state), affinity=self._affinity
        )
        logger.info("the LLM proxy serves again at %s", self.proxy.url)
