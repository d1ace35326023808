"""What a Dask task runs: members of a group, each an episode, a reward, a commit and an announcement.

A process holds one `EnvironmentWorker` (connection to the proxy, environment hosts, reward workers,
renderer, sample buffer) for all the tasks it is given, so that a trajectory starts no process and opens no
connection. Safe to run twice: a trajectory's name is deterministic and written conditionally.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from distributed import get_worker
from numpy.typing import NDArray

from blocks.sample_buffer import SampleBuffer
from infra.clock import now
from infra.object_store import ObjectStore
from infra.rpc import ConnectionLost, RpcClient, RpcError
from tasks.campaign import Campaign
from tasks.environment.episode import AbortSwitch, Episode, Renderer, run_episode, turn_seed
from tasks.environment.headers import fault_header, header_of
from tasks.environment.hosts import EnvironmentHosts
from tasks.environment.openai.episode import AgentProcess
from tasks.environment.openai.serving import AgentServing, external_token
from tasks.environment.rendering import ChatRenderer
from tasks.reward.dispatch import RewardWorkers
from tasks.reward.functions import RewardInput
from tasks.reward.usage import RewardUsage
from tasks.rollout.engines.base import Generation
from tasks.train.modes import MODES
from tasks.trajectory import (
    InfraError,
    MemberSpec,
    Outcome,
    Reward,
    Skip,
    StopReason,
    Trajectory,
    TrajectoryHeader,
)
from tasks.trajectory_arrow import from_arrow, to_arrow

logger = logging.getLogger(__name__)

Announce = Callable[[dict[str, Any]], None]
_FINISH_EVERY_S = 0.02
_STORE_THREADS = 8
_RECONNECT_S = 0.5


async def run_members(worker_settings: dict[str, Any], members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run members to their ends; returns their headers, in the order of `members`.

    Each header is announced under `worker_settings["topic"]` of Dask's event log as soon as its member ends;
    on its way Dask adds the item "worker", the address of the Dask worker.
    Settings: "proxy" {"url", "token"}, "campaign" (as JSON), "model" (directory), "samples" {"url"},
    "topic", and "prefix" of the trajectories' names on the wire ("" without one). Members are
    `MemberSpec.to_json()`, headers `TrajectoryHeader.to_json()`. What goes wrong with one member is in its
    header and leaves the others alone; raises only when the worker itself cannot be set up.
    """
    dask_worker = get_worker()
    topic = worker_settings["topic"]
    worker = await _present_worker(worker_settings)
    return await worker.run(
        [MemberSpec.from_json(member) for member in members],
        lambda header: dask_worker.log_event(topic, dict(header)),
        worker_settings.get("prefix", ""),
    )


async def close_worker() -> None:
    """End this process's worker and its children. Without it they end with the process."""
    global _worker
    if _worker is not None:
        present, _worker = _worker, None
        await _close(present)


async def reward_usage() -> dict[str, float] | None:
    """What rewards have taken in this process so far (`RewardUsage`); None where its worker is not up."""
    if _worker is None or not _worker.ready.done() or _worker.ready.exception() is not None:
        return None
    return _worker.ready.result().rewards.usage().to_json()


class _Present:
    """The process's worker, or the task that is setting it up, and what it was made for."""

    def __init__(self, made_for: Any, ready: "asyncio.Task[EnvironmentWorker]"):
        self.made_for = made_for
        self.ready = ready


_worker: _Present | None = None


async def _close(present: _Present) -> None:
    (worker,) = await asyncio.gather(present.ready, return_exceptions=True)
    if isinstance(worker, EnvironmentWorker):
        await worker.close()


async def _present_worker(settings: dict[str, Any]) -> "EnvironmentWorker":
    global _worker
    loop = asyncio.get_running_loop()
    made_for = [loop, settings["proxy"], settings["model"], settings["samples"], settings["campaign"]]
    if _worker is None or _worker.made_for != made_for:
        previous = _worker
        _worker = _Present(made_for, loop.create_task(EnvironmentWorker.start(settings)))
        if previous is not None and previous.made_for[0] is loop:
            await _close(previous)
    present = _worker
    try:
        return await asyncio.shield(present.ready)
    except Exception:
        if _worker is present:
            _worker = None
        raise


class Hosts(Protocol):
    """`tasks.environment.hosts.EnvironmentHosts`, as a worker needs it."""

    def environment(self, domain: str) -> AgentProcess: ...

    async def close(self) -> None: ...


class Rewards(Protocol):
    """`tasks.reward.dispatch.RewardWorkers`, as a worker needs it."""

    async def score(self, given: RewardInput, name: str = "") -> Outcome: ...

    def usage(self) -> RewardUsage: ...

    async def close(self) -> None: ...


class EnvironmentWorker:
    """Drives many episodes at a time on one event loop. Made by `start`, where its parts are real ones."""

    def __init__(
        self,
        campaign: Campaign,
        proxy: dict[str, Any],
        hosts: Hosts,
        rewards: Rewards,
        renderer: Renderer,
        buffer: SampleBuffer,
        context_limit: int | None,
    ):
        self._campaign = campaign
        self._proxy_address = proxy
        self._proxy: RpcClient | None = None
        self._hosts = hosts
        self._rewards = rewards
        self._renderer = renderer
        self._buffer = buffer
        self._context_limit = context_limit
        self._places = asyncio.Semaphore(campaign.environment.concurrent_trajectories)
        self._store_threads = ThreadPoolExecutor(_STORE_THREADS, thread_name_prefix="sample-buffer")
        self._switches: dict[str, AbortSwitch] = {}
        self._finished: list[str] = []
        self._finishing: set[asyncio.Task[None]] = set()
        self._connecting = asyncio.Lock()
        self._agents: AgentServing | None = None

    @classmethod
    async def start(cls, settings: dict[str, Any]) -> "EnvironmentWorker":
        """Connect to the proxy and start the children."""
        campaign = Campaign.parse(settings["campaign"])
        hosts = EnvironmentHosts(campaign.domains, campaign.environment.hosts)
        rewards = RewardWorkers(
            campaign.domains,
            campaign.reward.workers,
            memory_mb=campaign.reward.memory_mb,
            serverless=campaign.reward.serverless,
        )
        model = Path(settings["model"])
        multi_turn = any(domain.max_turns > 1 for domain in campaign.domains.values())
        try:
            renderer, _, _ = await asyncio.gather(
                asyncio.to_thread(
                    ChatRenderer,
                    model,
                    multi_turn=multi_turn,
                    options=campaign.model.chat_template_options,
                ),
                hosts.start(),
                rewards.start(),
            )
            worker = cls(
                campaign,
                settings["proxy"],
                hosts,
                rewards,
                renderer,
                SampleBuffer(ObjectStore(settings["samples"]["url"])),
                _context_limit(model),
            )
            await worker.connect()
            await worker._serve_agents(renderer)
        except BaseException:
            await hosts.close()
            await rewards.close()
            raise
        return worker

    @property
    def rewards(self) -> Rewards:
        return self._rewards

    async def connect(self) -> None:
        """Be there for the proxy's orders to abort, also before the first turn. Raises `ConnectionLost`."""
        await self._connected()

    async def close(self) -> None:
        """End the children and the connection, once the proxy has been told of what finished."""
        if self._finished:
            self._send_finished()
        await asyncio.gather(*self._finishing)
        if self._agents is not None:
            await self._agents.close()
        await asyncio.gather(self._hosts.close(), self._rewards.close())
        if self._proxy is not None:
            await self._proxy.close()
        self._store_threads.shutdown(wait=False)

    async def run(
        self, members: list[MemberSpec], announce: Announce, prefix: str = ""
    ) -> list[dict[str, Any]]:
        """As `run_members`, with the announcement as a function."""
        return await asyncio.gather(
            *(self._member(spec, announce, f"{prefix}{spec.key}") for spec in members)
        )

    async def _member(self, spec: MemberSpec, announce: Announce, name: str) -> dict[str, Any]:
        switch = self._switches[name] = AbortSwitch()
        place_held = False

        async def take_place() -> None:
            nonlocal place_held
            await self._places.acquire()
            place_held = True

        try:
            # A task of its own, so that an abort ends the wait and the episode and nothing after them.
            episode = await asyncio.create_task(self._episode(spec, name, switch, take_place))
            header = await asyncio.create_task(self._judge_and_commit(spec, episode, name, switch))
        except Exception as error:  # a fault that no stop reason foresees must not take the siblings along
            # A store that is full or gone fails every member; the run's own error says so once.
            logger.error("trajectory %s failed", name, exc_info=not isinstance(error, OSError))
            header = fault_header(spec, f"{type(error).__name__}: {error}")
        finally:
            if place_held:
                self._places.release()
            if self._switches.get(name) is switch:
                del self._switches[name]
            self._finish(name)
        data = header.to_json()
        announce(data)
        return data

    async def _episode(
        self, spec: MemberSpec, name: str, switch: AbortSwitch, take_place: Callable[[], Awaitable[None]]
    ) -> Episode:
        domain = self._campaign.domains[spec.domain]
        agent = domain.agent
        if agent is not None:
            assert self._agents is not None

            async def generate_in(session: str, *turn: Any) -> Generation:
                return await self._generate(spec, session, *turn)

            environment = self._hosts.environment(spec.domain)
            return await self._agents.episode(
                spec, domain, agent, name, environment, generate_in, switch, take_place
            )

        async def generate(context: NDArray[np.int32], max_new_tokens: int, turn: int) -> Generation:
            return await self._generate(spec, name, context, max_new_tokens, turn)

        return await run_episode(
            spec,
            domain,
            self._hosts.environment(spec.domain),
            generate,
            self._renderer,
            switch=switch,
            context_limit=self._context_limit,
            admitted=take_place,
        )

    async def _generate(
        self,
        spec: MemberSpec,
        session: str,
        context: NDArray[np.int32],
        max_new_tokens: int,
        turn: int,
    ) -> Generation:
        request = {
            "trajectory": session,
            "domain": spec.domain,
            "tokens": context.tobytes(),
            "max_new_tokens": max_new_tokens,
            "temperature": spec.temperature,
            "seed": turn_seed(spec.sampling_seed, turn),
            "initiating_version": spec.initiating_version,
        }
        answer = await self._ask_for_turn(request)
        return Generation(
            tokens=np.frombuffer(answer["tokens"], np.int32),
            logprobs=np.frombuffer(answer["logprobs"], np.float32),
            versions=np.frombuffer(answer["versions"], np.int32),
            stop=StopReason(answer["stop"]),
        )

    async def _ask_for_turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """Asked again while the proxy is started again: a turn's draws are the same the second time.

        Raises `RpcError`; TimeoutError after `rollout.generate_limit_s`.
        """
        lost_at: float | None = None
        async with asyncio.timeout(self._campaign.rollout.generate_limit_s):
            while True:
                try:
                    client = await self._connected()
                    lost_at = None
                    answer: dict[str, Any] = await client.call("generate", request)
                    return answer
                except ConnectionLost:
                    lost_at = lost_at or now()
                    if now() - lost_at > self._campaign.rollout.proxy_limit_s:
                        raise
                await asyncio.sleep(_RECONNECT_S)

    async def _judge_and_commit(
        self, spec: MemberSpec, episode: Episode, name: str, switch: AbortSwitch
    ) -> TrajectoryHeader:
        trajectory = episode.trajectory
        judged = now()
        outcome = await switch.ends(self._outcome_in_turn(spec, episode, name))
        if outcome is None and switch.reason is not None:
            trajectory.stop, outcome = switch.reason, Skip(switch.reason.value)
        assert outcome is not None
        trajectory.outcome = outcome
        reward_seconds = now() - judged
        committed = None
        if spec.commit and not trajectory.stop.is_aborted and isinstance(trajectory.outcome, Reward):
            committed = str(spec.key)
            trajectory = await self._commit(committed, trajectory)
        return header_of(trajectory, episode, reward_seconds, committed)

    async def _outcome_in_turn(self, spec: MemberSpec, episode: Episode, name: str) -> Outcome:
        """In a mode of lockstep, rewards are scored once the episodes of the whole batch are over."""
        stop = episode.trajectory.stop
        lockstep = MODES[self._campaign.train.mode].lockstep
        if lockstep and spec.commit and not stop.is_aborted and not stop.is_failure:
            with contextlib.suppress(ConnectionLost):  # a proxy started anew knows of no rounds
                await (await self._connected()).call("episode_over", {"trajectory": name})
        return await self._outcome(episode, name)

    async def _outcome(self, episode: Episode, name: str) -> Outcome:
        trajectory = episode.trajectory
        if trajectory.stop.is_failure:
            return InfraError(episode.error or trajectory.stop.value)
        if trajectory.stop.is_aborted:
            return Skip(trajectory.stop.value)
        if not trajectory.turns:
            return Skip(f"no token was sampled ({trajectory.stop.value})")
        return await self._rewards.score(
            RewardInput(
                domain=trajectory.domain,
                seed=trajectory.seed,
                prompt=episode.prompt,
                actions=tuple(turn.action for turn in trajectory.turns),
                observations=tuple(episode.observations),
                environment_rewards=tuple(turn.environment_reward for turn in trajectory.turns),
                stop=trajectory.stop.value,
                info=trajectory.info,
            ),
            name,
        )

    async def _commit(self, name: str, trajectory: Trajectory) -> Trajectory:
        """Store it; returns what the buffer holds under the name now: an earlier run's, if there was one."""
        if self._buffer.store.is_local:
            return _put(self._buffer, name, trajectory)  # quicker than a thread's turn at the interpreter
        return await asyncio.get_running_loop().run_in_executor(
            self._store_threads, _put, self._buffer, name, trajectory
        )

    def _finish(self, name: str) -> None:
        """Tell the proxy, together with others that end about now, that a trajectory is over."""
        first = not self._finished
        self._finished.append(name)
        if self._agents is not None:
            self._finished += self._agents.sessions_beside(name)
            self._agents.forget(name)
        if first:
            asyncio.get_running_loop().call_later(_FINISH_EVERY_S, self._send_finished)

    def _send_finished(self) -> None:
        names, self._finished = self._finished, []
        if names:
            self._in_background(self._tell_finished(names))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _tell_finished(self, names: list[str]) -> None:
        try:
            await (await self._connected()).call("finish", {"trajectories": names})
        except RpcError as error:
            logger.warning("the proxy was not told of %d finished trajectories: %s", len(names), error)

    async def _abort_sessions(self, sessions: list[str], reason: StopReason) -> None:
        """The control plane knows a trajectory by its name; an agent's other sessions end with it."""
        try:
            payload = {"trajectories": sessions, "reason": reason.value}
            await (await self._connected()).call("abort", payload)
        except RpcError as error:
            logger.warning("the proxy was not told to abort %d sessions: %s", len(sessions), error)

    async def _serve_agents(self, renderer: ChatRenderer) -> None:
        """Begin to serve the domains whose environment is an agent, if there are any."""
        agents = [agent for domain in self._campaign.domains.values() if (agent := domain.agent)]
        if not agents:
            return
        config = self._campaign.environment
        host = config.gateway_host
        address = (await self._connected()).local_address if host == "auto" else host
        token = external_token(agents, config.gateway_port)
        self._agents = await AgentServing.start(
            address, config.gateway_port, renderer, self._context_limit, token
        )

    async def _connected(self) -> RpcClient:
        """The connection to the proxy, made anew if it was lost. Raises `ConnectionLost`."""
        if self._proxy is not None and self._proxy.connected:
            return self._proxy
        async with self._connecting:
            if self._proxy is not None and self._proxy.connected:
                return self._proxy
            if self._proxy is not None:
                await self._proxy.close()
            client = RpcClient(self._proxy_address["url"], token=self._proxy_address.get("token"))
            self._proxy = await client.connect(on_notice=self._on_notice)
            return self._proxy

    def _on_notice(self, name: str, payload: Any) -> None:
        if name != "abort":
            return
        reason = StopReason(payload["reason"])
        beside: list[str] = []
        for trajectory in payload["trajectories"]:
            switch = self._switches.get(trajectory)
            if switch is None:
                continue
            switch.abort(reason)
            if self._agents is not None:
                beside += self._agents.sessions_beside(trajectory)
        if beside:
            self._in_background(self._abort_sessions(beside, reason))


def _put(buffer: SampleBuffer, name: str, trajectory: Trajectory) -> Trajectory:
    version = trajectory.initiating_version
    if buffer.put(name, version, to_arrow(trajectory)):
        return trajectory
    return from_arrow(buffer.get_many([(name, version)])[0])


def _context_limit(model: Path) -> int | None:
    """The most tokens the model attends to, as its configuration says."""
    limit = json.loads((model / "config.json").read_text()).get("max_position_embeddings")
    return None if limit is None else int(limit)
