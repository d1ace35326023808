"""One episode: reset, then render, generate, decode and step until something ends it."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from infra.clock import now
from infra.rpc import RpcError
from tasks.environment.config import DomainConfig
from tasks.environment.hosts import EnvironmentFault, EnvironmentTimeout
from tasks.environment.rendering import Continuation, Dialogue
from tasks.environment.sources.base import StepResult
from tasks.rollout.engines.base import Generation
from tasks.trajectory import NOT_GENERATED, MemberSpec, Skip, StopReason, Trajectory, Turn

Generate = Callable[[NDArray[np.int32], int, int], Awaitable[Generation]]
"""(context ids, tokens at most, index of the turn) -> what was sampled."""

_STOP_OF_CODE = {
    "stale": StopReason.STALE,
    "cancelled": StopReason.CANCELLED,
    "context_overflow": StopReason.CONTEXT_OVERFLOW,
}


class EpisodeEnvironment(Protocol):
    """`tasks.environment.hosts.HostedEnvironment`, as an episode needs it."""

    async def reset(self, seed: int) -> str: ...

    async def step(self, action: str, last: bool = False) -> StepResult: ...

    def close(self) -> None: ...


class Renderer(Protocol):
    """`tasks.environment.rendering.ChatRenderer`, as an episode needs it."""

    def initial(self, prompt: str, system: str | None = None) -> NDArray[np.int32]: ...

    def follow(self, dialogue: Dialogue) -> Continuation: ...

    def decode(self, response: NDArray[np.int32]) -> str: ...


@dataclass(slots=True)
class Episode:
    """What an episode left: the trajectory to store, and what a reward function sees beside it."""

    trajectory: Trajectory
    prompt: str
    observations: list[str]  # the answer to each step, the last one too
    environment_seconds: float  # reset and steps
    error: str  # why it failed, if it did


Judgement = TypeVar("Judgement")


class AbortSwitch:
    """Lets the control plane end an episode from outside while it runs in a task of its own.

    A generation under way is given `grace_s` to come back with the tokens made so far, since the inference
    side aborts it too; a reset or step under way is left behind at once.
    """

    def __init__(self, grace_s: float = 1.0):
        self.reason: StopReason | None = None
        self._grace_s = grace_s
        self._task: asyncio.Task[Any] | None = None
        self.generating = False
        """Whether a generation is under way, which an abort lets come back with what it has."""
        self._over = False

    def abort(self, reason: StopReason) -> None:
        """End the episode with `reason`. Too late, or a second time, it changes nothing."""
        if self.reason is not None or self._over:
            return
        self.reason = reason
        if self._task is None:
            return
        if self.generating:
            asyncio.get_running_loop().call_later(self._grace_s, self._interrupt)
        else:
            self._task.cancel()

    def _interrupt(self) -> None:
        if self.generating and self._task is not None:
            self._task.cancel()

    async def ends(self, work: Awaitable[Judgement]) -> Judgement | None:
        """Wait for what follows the episode; None when an abort came before it was done.

        To be awaited in a task of its own, like the episode.
        """
        if self.reason is not None:
            return await work
        self.begin()
        try:
            return await work
        except asyncio.CancelledError:
            if not self.interrupted():
                raise
            return None
        finally:
            self.end()

    def begin(self) -> None:
        """The present task is what an abort ends from now on."""
        self._task, self._over = asyncio.current_task(), False

    def end(self) -> None:
        """An abort changes nothing any more."""
        self._over = True

    def interrupted(self) -> bool:
        """Whether the cancellation now being handled is this switch's own."""
        if self.reason is None or self._task is None:
            return False
        return self._task.uncancel() == 0


def turn_seed(sampling_seed: int, turn: int) -> int:
    """The seed of a turn's draws: 63 bits of BLAKE2b of the member's seed and the turn's index."""
    digest = hashlib.blake2b(b"%d:%d" % (sampling_seed, turn), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(slots=True)
class _Arrays:
    """The segment under construction; never longer than `max_tokens`."""

    max_tokens: int
    length: int = 0
    tokens: NDArray[np.int32] = field(init=False)
    logprobs: NDArray[np.float32] = field(init=False)
    versions: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = np.empty(self.max_tokens, np.int32)
        self.logprobs = np.zeros(self.max_tokens, np.float32)
        self.versions = np.empty(self.max_tokens, np.int32)

    @property
    def context(self) -> NDArray[np.int32]:
        return self.tokens[: self.length]

    def append(self, tokens: NDArray[np.int32]) -> None:
        # What a long budget leaves unused is never touched, and so takes no memory.
        start, end = self.length, self.length + len(tokens)
        self.tokens[start:end] = tokens
        self.versions[start:end] = NOT_GENERATED
        self.length = end

    def append_sampled(self, generation: Generation) -> None:
        start, end = self.length, self.length + len(generation.tokens)
        self.tokens[start:end] = generation.tokens
        self.logprobs[start:end] = generation.logprobs
        self.versions[start:end] = generation.versions
        self.length = end


async def run_episode(
    spec: MemberSpec,
    domain: DomainConfig,
    environment: EpisodeEnvironment,
    generate: Generate,
    renderer: Renderer,
    *,
    switch: AbortSwitch | None = None,
    context_limit: int | None = None,
    admitted: Callable[[], Awaitable[None]] | None = None,
) -> Episode:
    """Run one episode to its end, once `admitted` returns.

    Every fault of environment or engine is a stop reason, never an exception.
    Budgets are checked before a turn is asked for: a turn is shortened to what `domain.max_tokens` and
    `context_limit` (tokens the model can attend to) leave, and an observation after which no token could be
    sampled is left out. Where the renderer begins a context anew, the trajectory gets another segment, and
    the budgets are of each segment. The outcome is not judged here.

    `generate` may raise `RpcError` with code `stale`, `cancelled` or `context_overflow`; any other code, a
    lost connection or a TimeoutError is a generation error. An abort keeps the tokens sampled so far.
    """
    run = _Run(spec, domain, environment, generate, renderer, context_limit)
    switch = switch or AbortSwitch()
    switch.begin()
    stop = switch.reason
    try:
        if stop is None and admitted is not None:
            await admitted()
        if stop is None:
            stop = await run.to_the_end(switch)
    except asyncio.CancelledError:
        if not switch.interrupted():
            raise
        stop = switch.reason
    except EnvironmentTimeout as error:
        stop, run.error = StopReason.ENVIRONMENT_TIMEOUT, str(error)
    except EnvironmentFault as error:
        stop, run.error = StopReason.ENVIRONMENT_ERROR, f"{type(error).__name__}: {error}"
    finally:
        switch.end()
        environment.close()
    assert stop is not None
    return run.episode(stop)


class _Run:
    def __init__(
        self,
        spec: MemberSpec,
        domain: DomainConfig,
        environment: EpisodeEnvironment,
        generate: Generate,
        renderer: Renderer,
        context_limit: int | None,
    ):
        self._spec = spec
        self._domain = domain
        self._environment = environment
        self._generate = generate
        self._renderer = renderer
        self._context_limit = context_limit if context_limit is not None else domain.max_tokens
        self._arrays = _Arrays(min(domain.max_tokens, self._context_limit))
        self._past: list[_Arrays] = []  # finished segments
        self._offset = 0  # tokens in these
        self._turns: list[Turn] = []
        self._dialogue = Dialogue("", domain.system_prompt)
        self._info: dict[str, Any] = {}
        self._environment_seconds = 0.0
        self.error = ""

    async def to_the_end(self, switch: AbortSwitch) -> StopReason:
        started = now()
        dialogue = self._dialogue
        dialogue.prompt = await self._environment.reset(self._spec.environment_seed)
        self._environment_seconds += now() - started
        ahead = self._renderer.initial(dialogue.prompt, dialogue.system)
        while True:
            room = self._arrays.max_tokens - self._arrays.length - len(ahead)
            if room <= 0:
                return self._out_of_room()
            self._arrays.append(ahead)
            ended = await self._turn(min(self._domain.max_turn_tokens, room), switch)
            if ended is not None:
                return ended
            continuation = self._renderer.follow(dialogue)
            ahead = continuation.ids
            if continuation.fresh and len(ahead) < self._arrays.max_tokens:
                self._past.append(self._arrays)
                self._offset += self._arrays.length
                self._arrays = _Arrays(self._arrays.max_tokens)

    async def _turn(self, budget: int, switch: AbortSwitch) -> StopReason | None:
        index = len(self._turns)
        asked = now()
        switch.generating = True
        try:
            generation = await self._generate(self._arrays.context, budget, index)
        except RpcError as error:
            if switch.reason is not None:
                return switch.reason
            self.error = str(error)
            return _STOP_OF_CODE.get(error.code, StopReason.GENERATION_ERROR)
        except TimeoutError:
            self.error = "no generation within rollout.generate_limit_s"
            return StopReason.GENERATION_ERROR
        finally:
            switch.generating = False
        self.error = malformed(generation, budget)
        if self.error:
            return StopReason.GENERATION_ERROR
        answered = now()
        start = self._arrays.length
        self._arrays.append_sampled(generation)
        action = self._renderer.decode(generation.tokens)
        turn = Turn(
            self._offset + start,
            self._offset + self._arrays.length,
            generation.stop,
            action,
            generate_seconds=answered - asked,
        )
        self._turns.append(turn)
        if generation.stop.is_aborted or switch.reason is not None:
            return switch.reason or generation.stop
        last = index + 1 >= self._domain.max_turns
        try:
            result = await self._environment.step(action, last)
        finally:
            turn.environment_seconds = now() - answered
            self._environment_seconds += turn.environment_seconds
        turn.environment_reward = result.reward
        self._dialogue.responses.append(generation.tokens)
        self._dialogue.observations.append(result.observation)
        self._info = result.info
        if result.terminated:
            return StopReason.TERMINATED
        if result.truncated:
            return StopReason.TRUNCATED
        return StopReason.MAX_TURNS if last else None

    def _out_of_room(self) -> StopReason:
        if self._domain.max_tokens <= self._context_limit:
            return StopReason.MAX_TOKENS
        return StopReason.CONTEXT_OVERFLOW

    def episode(self, stop: StopReason) -> Episode:
        segments = [*self._past, self._arrays]
        versions = np.concatenate([segment.versions[: segment.length] for segment in segments])
        starts = np.cumsum([0, *(segment.length for segment in self._past)])
        trajectory = Trajectory(
            key=self._spec.key,
            domain=self._spec.domain,
            seed=self._spec.environment_seed,
            initiating_version=self._spec.initiating_version,
            tokens=np.concatenate([segment.context for segment in segments]),
            loss_mask=versions != NOT_GENERATED,
            logprobs=np.concatenate([segment.logprobs[: segment.length] for segment in segments]),
            versions=versions,
            turns=self._turns,
            stop=stop,
            outcome=Skip("not judged"),
            info=self._info,
            segment_starts=tuple(starts.tolist()),
        )
        dialogue = self._dialogue
        return Episode(
            trajectory, dialogue.prompt, dialogue.observations, self._environment_seconds, self.error
        )


def malformed(generation: Generation, budget: int) -> str:
    """What is wrong with what an engine returned; empty when nothing is."""
    length = len(generation.tokens)
    if length != len(generation.logprobs) or length != len(generation.versions):
        return (
            f"the engine returned {length} tokens, {len(generation.logprobs)} log-probabilities and "
            f"{len(generation.versions)} versions"
        )
    if length > budget:
        return f"the engine returned {length} tokens where {budget} were asked for"
    if length == 0 and not generation.stop.is_aborted:
        return f"the engine returned no token and stopped with {generation.stop.value!r}"
    if bool((generation.versions < 0).any()):
        return "the engine returned a sampled token without a version stamp"
    return ""
