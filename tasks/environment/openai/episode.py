"""An episode that an agent drives: its program runs, its calls are the turns."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from infra.clock import now
from tasks.environment.episode import AbortSwitch, Episode
from tasks.environment.hosts import EnvironmentFault, EnvironmentRaised, EnvironmentTimeout
from tasks.environment.openai.config import AgentOptions
from tasks.environment.openai.run import AgentRun
from tasks.environment.sources.base import StepResult
from tasks.trajectory import NOT_GENERATED, MemberSpec, Skip, StopReason, Trajectory, Turn

_GRACE_S = 10.0
"""A command's own process ends it in time; only if that fails its host is killed, this much later."""


class AgentProcess(Protocol):
    """`tasks.environment.hosts.HostedEnvironment` of the source `agent`."""

    async def reset(self, seed: int) -> str:
        """Returns the task, as JSON."""

    async def step(self, action: str, last: bool = False, limit_s: float | None = None) -> StepResult:
        """Run the agent to its end with the access it is given, as JSON."""

    def close(self) -> None: ...


async def run_agent_episode(
    spec: MemberSpec,
    agent: AgentProcess,
    options: AgentOptions,
    run: AgentRun,
    serving: Callable[[AgentRun], AbstractContextManager[dict[str, Any]]],
    offer: Callable[[str, str, dict[str, Any], float], Awaitable[StepResult]],
    *,
    switch: AbortSwitch,
    admitted: Callable[[], Awaitable[None]] | None = None,
) -> Episode:
    """As `tasks.environment.episode.run_episode`, for an agent; `serving` gives it access to `run`, and
    `offer` has one that runs elsewhere play it.

    The agent's end is the episode's: `terminated`, or the budget for which a call was refused. A call that
    is refused does not end it, so an agent may make the best of what it has. Its reward is the last turn's
    environment reward, and its output the last observation. An agent that is too slow ends with
    `environment_timeout`, one that fails with `environment_error`, unless a budget had run out: then it ends
    with that.
    """
    driver = _Driver(spec, agent, options, run, offer)
    switch.begin()
    stop = switch.reason
    try:
        if stop is None and admitted is not None:
            await admitted()
        if stop is None:
            with serving(run) as access:
                stop = await driver.to_the_end(access, switch)
    except asyncio.CancelledError:
        if not switch.interrupted():
            raise
        stop = switch.reason
    except EnvironmentTimeout as error:
        stop, driver.error = StopReason.ENVIRONMENT_TIMEOUT, str(error)
    except EnvironmentFault as error:
        stop = run.refused_for or StopReason.ENVIRONMENT_ERROR
        driver.error = f"{type(error).__name__}: {error}"
    finally:
        switch.end()
        run.end(switch.reason or stop or StopReason.CANCELLED)
        agent.close()
    assert stop is not None
    return driver.episode(stop)


class _Driver:
    def __init__(
        self,
        spec: MemberSpec,
        agent: AgentProcess,
        options: AgentOptions,
        run: AgentRun,
        offer: Callable[[str, str, dict[str, Any], float], Awaitable[StepResult]],
    ):
        self._spec = spec
        self._agent = agent
        self._options = options
        self._run = run
        self._offer = offer
        self._task = ""
        self._result = StepResult("", 0.0, terminated=True)
        self._seconds = 0.0
        self.error = ""

    async def to_the_end(self, access: dict[str, Any], switch: AbortSwitch) -> StopReason:
        started = now()
        running: asyncio.Task[StepResult] | None = None
        over = asyncio.ensure_future(self._run.over.wait())
        self._run.watch(switch)
        try:
            self._task = await self._agent.reset(self._spec.environment_seed)
            running = asyncio.ensure_future(self._play(access))
            await asyncio.wait({running, over}, return_when=asyncio.FIRST_COMPLETED)
            if self._run.stop is not None:
                self.error = self._run.error
                return self._run.stop
            self._result = await running
            if self._result.info.get("timed_out") is True:
                raise EnvironmentTimeout(
                    f"the agent took longer than {self._options.timeout_s:g} s: see "
                    f"domains.{self._spec.domain}.options.timeout_s"
                )
        finally:
            over.cancel()
            if running is not None and not running.done():
                running.cancel()
            self._seconds = max(0.0, now() - started - self._run.waited_s)
        return self._run.refused_for or StopReason.TERMINATED

    async def _play(self, access: dict[str, Any]) -> StepResult:
        options = self._options
        if not options.external:
            limit_s = options.timeout_s + (_GRACE_S if options.command else 0)
            return await self._agent.step(json.dumps(access), True, limit_s)
        try:
            return await self._offer(self._spec.domain, self._task, access, options.timeout_s)
        except EnvironmentRaised as error:
            if options.failure_reward is None:
                raise
            return StepResult(str(error), options.failure_reward, True, info={"failure": str(error)})

    def episode(self, stop: StopReason) -> Episode:
        segments = [segment for segment in self._run.conversations.segments if segment.sampled]
        lengths = [len(segment.tokens) for segment in segments]
        starts = [0, *np.cumsum(lengths).tolist()]
        turns: list[Turn] = []
        for segment, start in zip(segments, starts, strict=False):
            for turn in segment.turns:
                turn.response_start += start
                turn.response_end += start
                turns.append(turn)
        if turns:
            turns[-1].environment_reward = self._result.reward
            turns[-1].environment_seconds = self._seconds
        versions = np.concatenate([np.empty(0, np.int32), *(segment.versions for segment in segments)])
        logprobs = [np.empty(0, np.float32), *(segment.logprobs for segment in segments)]
        tokens = [np.empty(0, np.int32), *(segment.tokens for segment in segments)]
        info = dict(self._result.info)
        if self._run.ignored:
            info["ignored_options"] = dict(sorted(self._run.ignored.items()))
        trajectory = Trajectory(
            key=self._spec.key,
            domain=self._spec.domain,
            seed=self._spec.environment_seed,
            initiating_version=self._spec.initiating_version,
            tokens=np.concatenate(tokens),
            loss_mask=versions != NOT_GENERATED,
            logprobs=np.concatenate(logprobs),
            versions=versions,
            turns=turns,
            stop=stop,
            outcome=Skip("not judged"),
            info=info,
            segment_starts=tuple(starts[:-1]) or (0,),
        )
        observations = [""] * max(0, len(turns) - 1) + [self._result.observation]
        return Episode(trajectory, self._task, observations, self._seconds, self.error)
