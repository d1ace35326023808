"""Starts the services of a simulated run in this process: the real proxy, modelled engines and trainer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from infra.launcher import LOCAL_POOL, Attendance, Role
from infra.processes import ServiceFailed
from infra.rpc import RpcClient, RpcServer
from tasks.rollout.engines.modelled.engine import EngineLimits, ModelledEngine
from tasks.rollout.engines.service import engine_handlers
from tasks.rollout.proxy_service import serve_proxy
from tasks.simulation.fitting import EnginePlan, Fitted
from tasks.simulation.machine import Machines
from tasks.simulation.trainer import SimulatedTrainer
from tasks.simulation.weights import SimulatedWeights
from tasks.simulation.workload import Workload
from tasks.train.service import trainer_server

HOST = "inproc"
END_TOKEN = 2
"""Sampled where a turn ends by itself; its only use is that it is none of the others."""
Ready = Callable[[dict[str, Any]], None]


class InProcessService:
    """A service that is a task of this process, reached over in-process connections."""

    def __init__(self, name: str, task: "asyncio.Task[None]", ready: dict[str, Any], token: str | None):
        self.name = name
        self.ready = ready
        self._task = task
        self._token = token
        self._client: RpcClient | None = None

    @classmethod
    async def start(
        cls, name: str, serve: Callable[[Ready], Coroutine[Any, Any, None]], token: str | None
    ) -> "InProcessService":
        """Returns once the service has called `ready`. Raises `ServiceFailed` where it ends before."""
        said: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        task = asyncio.get_running_loop().create_task(serve(said.set_result), name=name)
        waiting: set[asyncio.Future[Any]] = {task, said}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not said.done():
            said.cancel()
            raise ServiceFailed(f"{name} did not start: {task.exception()}") from task.exception()
        return cls(name, task, said.result(), token)

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    async def call(self, method: str, payload: Any = None, *, stage: str | None = None) -> Any:
        if self._client is None:
            self._client = RpcClient(self.url, token=self._token)
            await self._client.connect()
        return await self._client.call(method, payload)

    async def ended(self) -> str:
        await asyncio.wait({self._task})
        return "it was stopped" if self._task.cancelled() else f"it ended: {self._task.exception()}"

    async def alive(self) -> None:
        """It is part of this process."""

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._client is not None:
            await self._client.close()


class SimulatedLauncher:
    """`infra.launcher.Launcher` for `tasks.open_session`. Engines have the places that the cluster gives."""

    runs_stages = False

    def __init__(
        self,
        fitted: Fitted,
        workload: Workload,
        trainer: SimulatedTrainer,
        weights: SimulatedWeights,
        machines: Machines,
    ):
        self._fitted = fitted
        self._workload = workload
        self._trainer = trainer
        self._weights = weights
        self._machines = machines
        self.engines: dict[str, ModelledEngine] = {}
        """Those that run, by name."""

    def pools(self, role: Role) -> tuple[str, ...]:
        """Of rollout and prefill, the pool of every engine, in order: so each gets the place it has there."""
        if role in ("rollout", "prefill"):
            return self._fitted.pools(prefill=role == "prefill")
        return (self._fitted.cluster.train.pool,) if role == "train" else (LOCAL_POOL,)

    async def start(
        self,
        pool: str,
        name: str,
        module: str,
        settings: dict[str, Any],
        log: Path,
        *,
        environment: dict[str, str] | None = None,
        start_limit_s: float = 120.0,
    ) -> InProcessService:
        async def serve(ready: Ready) -> None:
            match module:
                case "tasks.rollout.engines.service":
                    await self._serve_engine(name, settings, ready)
                case "tasks.rollout.proxy_service":
                    await serve_proxy({**settings, "host": HOST}, ready)
                case "tasks.train.service":
                    await self._serve_trainer(settings, ready)
                case _:
                    raise ServiceFailed(f"{module} is not simulated")

        return await InProcessService.start(name, serve, settings.get("token"))

    @contextlib.asynccontextmanager
    async def attend(self, role: Role, step: int) -> AsyncIterator[Attendance]:
        yield Attendance()

    async def _serve_engine(self, name: str, settings: dict[str, Any], ready: Ready) -> None:
        plan = self._fitted.engines[int(name.rpartition("-")[2])]
        spec = plan.spec
        engine = ModelledEngine(
            timing=plan.timing,
            limits=EngineLimits(
                max_running=spec.max_running,
                max_batch_tokens=spec.max_batch_tokens,
                max_context=settings["max_context"],
                block_tokens=spec.block_tokens,
                prefix_cache=spec.prefix_cache,
            ),
            response_tokens=self._workload.response_tokens,
            prompt_of=self._workload.prompt_of,
            end_token=END_TOKEN,
            kv_tokens=plan.kv_tokens,
            kv_transfer_s=self._kv_transfer_s(plan),
            pull=self._weights.pull,
            update_s=self._weights.load_seconds(spec.parallel.devices),
            clock=self._machines.engine_clock(),
            version=settings["version"] or 0,
        )
        handlers = engine_handlers(engine)
        if self._weights.direct:
            handlers["prefetch"] = _nothing_to_pull
        async with engine:
            server = RpcServer(handlers, token=settings["token"])
            ready({"url": await server.start(HOST), "version": settings["version"] or 0})
            self.engines[name] = engine
            try:
                await engine.wait_failed()
            except Exception:
                await server.stop()  # its connections tell the proxy; at the run's end nobody is to be told
                raise

    def _kv_transfer_s(self, plan: EnginePlan) -> Callable[[int], float]:
        """Of so many tokens' KV from another engine: over the network card of each device, their share."""
        rate = plan.spec.parallel.devices * plan.timing.hardware.network_gb_s * 1e9
        bytes_per_token = self._fitted.size.kv_bytes_per_token
        return lambda tokens: tokens * bytes_per_token / rate

    async def _serve_trainer(self, settings: dict[str, Any], ready: Ready) -> None:
        server = trainer_server(self._trainer.run, settings)
        ready({"url": await server.start(HOST), "version": self._trainer.version})
        try:
            await asyncio.Event().wait()
        finally:
            await server.stop()


async def _nothing_to_pull(*_: Any) -> None:
    """There is no store: the trainer sends while the engines wait for it, which an update begins with."""
