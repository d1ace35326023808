"""The LLM proxy: the one door between environments and inference workers.

It routes each turn of a trajectory, holds new turns back while the engines take new weights, refuses turns of
trajectories that have become too old, aborts trajectories on the control plane's word, and lets a turn that
was lost with its worker go on elsewhere. It never looks into the tokens.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from infra.rpc import ConnectionLost, RpcClient, RpcError
from tasks.rollout.continuation import PartialTurn
from tasks.rollout.lockstep import Lockstep
from tasks.rollout.prefill import PrefillPlan
from tasks.rollout.prefill_dispatch import Kv, PrefillDispatch
from tasks.rollout.routing import NoWorker, Router
from tasks.rollout.turn_gate import TurnGate, TurnRefused
from tasks.rollout.updates import Updates
from tasks.rollout.worker_life import WorkerPhase
from tasks.rollout.workers import EngineAddress, WorkerLimits, Workers
from tasks.trajectory import StopReason

logger = logging.getLogger(__name__)

_NOT_THE_WORKERS_FAULT = ("context_overflow", "invalid_request")


@dataclass(eq=False, slots=True)
class _Flight:
    """A turn in flight, and the task that answers it."""

    turn: PartialTurn
    task: "asyncio.Task[Any] | None"
    superseded: asyncio.Event | None = None  # once another turn takes its place; set when this one is over


class LLMProxy:
    """Decisions are made by pure parts (router, gate, partial turns, workers' lives); this class carries them
    out between connections. `max_open` bounds the trajectories remembered: of those that never finish, the
    one whose last turn is longest ago is forgotten.
    """

    def __init__(
        self,
        router: Router,
        generate_limit_s: float,
        *,
        limits: WorkerLimits | None = None,
        version: int = 0,
        suspended: bool = False,
        lockstep: Lockstep | None = None,
        max_open: int = 100_000,
        min_prefill_tokens: int = 128,
    ):
        limits = limits or WorkerLimits()
        self.workers = Workers(router, limits, self._on_notice)
        self.updates = Updates(self.workers, limits.command_s, version, suspended=suspended)
        self.gate = TurnGate()
        self.counts: Counter[str] = Counter(turns=0, continued_turns=0, kept_tokens=0)
        """`continued_turns`: went on after their worker was lost; `kept_tokens`: sampled before that."""
        plan = PrefillPlan(min_prefill_tokens)
        self._prefills = PrefillDispatch(router, self.workers, plan, generate_limit_s)
        self._router = router
        self._limit_s = generate_limit_s
        self._lockstep = lockstep
        self._max_open = max_open
        self._open: OrderedDict[str, None] = OrderedDict()  # trajectories, the last used at the end
        self._in_flight: dict[str, _Flight] = {}
        self._running = 0

    @property
    def turns(self) -> int:
        return self.counts["turns"]

    @property
    def open_trajectories(self) -> int:
        return len(self._open)

    @property
    def held_turns(self) -> int:
        """Turns in flight that no worker has: they wait for an update, for a round, or for a worker."""
        return len(self._in_flight) - self._running

    @property
    def reported_tokens(self) -> int:
        """Tokens of turns in flight that would be kept if all workers were lost now."""
        return sum(flight.turn.kept for flight in self._in_flight.values())

    async def add_engine(self, address: EngineAddress) -> None:
        """A worker that holds the served version already. Raises `ConnectionLost`."""
        self.workers.admit(address, await self.workers.connect(address))

    async def close(self) -> None:
        await self.workers.close()

    async def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        """One turn, as the engine answers it.

        Raises `RpcError` with code `stale`, `cancelled`, `context_overflow`, `superseded` or
        `generation_failed`. A turn lost with its worker goes on elsewhere, from its context and the tokens
        that the worker had reported. A trajectory's second turn ends the one in flight: whoever asked for
        that one is gone, and the trajectory runs again or asks again.
        """
        trajectory: str = payload["trajectory"]
        while trajectory in self._in_flight:
            await self._supersede(trajectory)
        turn = PartialTurn(
            trajectory,
            payload["tokens"],
            payload["max_new_tokens"],
            payload["temperature"],
            payload["seed"],
        )
        flight = self._in_flight[trajectory] = _Flight(turn, asyncio.current_task())
        self._remember(trajectory)
        try:
            async with self._round_of(trajectory):
                return await self._turn(turn, trajectory, payload["domain"], payload["initiating_version"])
        except asyncio.CancelledError:
            if flight.superseded and flight.task and flight.task.uncancel() == 0:
                raise RpcError("superseded", f"{trajectory} has asked for another turn") from None
            raise
        finally:
            del self._in_flight[trajectory]
            if flight.superseded is not None:
                flight.superseded.set()

    async def _supersede(self, trajectory: str) -> None:
        flight = self._in_flight[trajectory]
        if flight.task is None or flight.task is asyncio.current_task():
            raise RpcError("generation_failed", f"{trajectory} has a turn in flight")
        if flight.superseded is None:
            flight.superseded = asyncio.Event()
            flight.task.cancel()
        await flight.superseded.wait()

    async def _turn(
        self, turn: PartialTurn, trajectory: str, domain: str, initiating_version: int | None
    ) -> dict[str, Any]:
        kv = await self._prefilled_kv(turn, trajectory, domain, initiating_version)
        while True:
            await self.updates.opened()
            try:
                self.gate.check(trajectory, initiating_version)
                name = self._router.route(trajectory, domain)
                client = self.workers.client(name)
            except TurnRefused as refusal:
                raise RpcError(refusal.reason, str(refusal)) from refusal
            except NoWorker as error:
                if not self.workers.awaited:
                    raise RpcError("generation_failed", str(error)) from error
                await self.workers.changed()
                continue
            if turn.kept:
                self.counts["continued_turns"] += 1
                self.counts["kept_tokens"] += turn.kept
            self._running += 1
            try:
                answer = await self._sample(name, {**turn.ask(client), **kv})
            except ConnectionLost as error:
                self.workers.lost(name, str(error), client)
                continue
            except TimeoutError as error:
                message = f"no answer in rollout.generate_limit_s ({self._limit_s} s)"
                self._failed(name, RpcError("timed_out", message), client)
                raise RpcError("generation_failed", message) from error
            except RpcError as error:
                self._failed(name, error, client)
                raise RpcError("generation_failed", f"{name}: {error}") from error
            finally:
                self._running -= 1
            self._router.succeeded(name)
            self.counts["turns"] += 1
            whole = turn.joined(answer)
            self._prefills.decoded(trajectory, client, turn.length(whole), self.updates.version)
            return whole

    async def _prefilled_kv(
        self, turn: PartialTurn, trajectory: str, domain: str, initiating_version: int | None
    ) -> Kv:
        """Has a prefill worker compute the context where that is worth while. The turn is admitted after it
        again, since versions and aborts may have come in between."""
        await self.updates.opened()
        try:
            self.gate.check(trajectory, initiating_version)
        except TurnRefused as refusal:
            raise RpcError(refusal.reason, str(refusal)) from refusal
        return await self._prefills.prefill(trajectory, turn.context, domain, self.updates.version)

    async def _sample(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """The turn's generation on one worker."""
        client = self.workers.client(name)
        try:
            answer: dict[str, Any] = await client.call("generate", request, self._limit_s)
        except RpcError as error:
            if error.code != "session_busy":
                raise
            # Nobody here waits for that turn: a proxy before this one asked for it, or the caller has left.
            session = request["session"]
            logger.warning("%s still runs a turn of %s that nobody waits for: it is aborted", name, session)
            await client.call("abort", {"sessions": [session], "reason": StopReason.CANCELLED.value})
            answer = await client.call("generate", request, self._limit_s)
        return answer

    def _failed(self, name: str, error: RpcError, client: RpcClient) -> None:
        """A worker answered a turn with an error. Raises it where it is the turn's own."""
        if error.code == "context_overflow":
            raise error
        if error.code not in _NOT_THE_WORKERS_FAULT and self._router.failed(name):
            self.workers.lost(name, f"turns failed repeatedly, the last one with {error}", client)

    def _round_of(self, trajectory: str) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._lockstep is None else self._lockstep.turn(trajectory)

    def _on_notice(self, client: RpcClient, name: str, payload: Any) -> None:
        if name != "sampled":
            return
        flight = self._in_flight.get(payload["session"])
        if flight is not None:
            flight.turn.take(
                client, payload["start"], payload["tokens"], payload["logprobs"], payload["versions"]
            )

    def _remember(self, trajectory: str) -> None:
        self._open[trajectory] = None
        self._open.move_to_end(trajectory)
        if len(self._open) > self._max_open:
            oldest = next(iter(self._open))
            if oldest not in self._in_flight:
                self._forget([oldest])

    def _forget(self, trajectories: list[str]) -> dict[str, list[str]]:
        """These are over. Returns which of them each worker still holds KV of."""
        held: dict[str, list[str]] = {}
        self.gate.finish(trajectories)
        for trajectory in trajectories:
            self._open.pop(trajectory, None)
            name = self._router.release(trajectory)
            if name is not None:
                held.setdefault(name, []).append(trajectory)
        for prefiller, sessions in self._prefills.finish(trajectories).items():
            held.setdefault(prefiller, []).extend(sessions)
        return held

    async def finish(self, trajectories: list[str]) -> None:
        """These trajectories are over: their KV caches may go."""
        held = self._forget(trajectories)
        if self._lockstep is not None:
            self._lockstep.over(trajectories)
        phases = self.workers.phases()
        await asyncio.gather(
            *(
                self.workers.command(name, "end_sessions", {"sessions": sessions})
                for name, sessions in held.items()
                if phases[name].serves
            ),
            return_exceptions=True,
        )

    async def abort(self, trajectories: list[str], reason: StopReason) -> None:
        """End these trajectories' running turns and refuse further ones."""
        self.gate.abort(trajectories, reason)
        if self._lockstep is not None:
            self._lockstep.over(trajectories)
        await self.workers.command_all("abort", {"sessions": trajectories, "reason": reason.value})

    def expect(self, trajectories: list[str]) -> None:
        """In lockstep modes: these will ask for turns, and rounds wait for them."""
        if self._lockstep is not None:
            self._lockstep.expect(trajectories)

    async def episode_over(self, trajectory: str) -> None:
        """In lockstep modes: returns once the episodes of all expected trajectories are over."""
        if self._lockstep is not None:
            await self._lockstep.episode_over(trajectory)

    def rebind(self, affinity: dict[str, str]) -> None:
        """Domains prefer these pools from now on; trajectories that are placed stay where they are."""
        self._router.rebind(affinity)

    def set_oldest_admissible(self, version: int) -> None:
        """Refuse turns of trajectories begun before this version."""
        self.gate.set_oldest_admissible(version)

    async def stats(self) -> dict[str, Any]:
        """`past` sums what lives of workers that are lost had done when they were last asked."""
        engines, past = await self.workers.stats()
        return {
            "version": self.updates.version,
            **self.counts,
            "prefilled_turns": self._prefills.prefilled_turns,
            "open_trajectories": self.open_trajectories,
            "held_turns": self.held_turns,
            "reported_tokens": self.reported_tokens,
            "workers": {name: phase.value for name, phase in self.workers.phases().items()},
            "served": self._router.served(),
            "engines": engines,
            "past": dict(past),
        }

    def workers_by_phase(self) -> Counter[WorkerPhase]:
        return Counter(self.workers.phases().values())
