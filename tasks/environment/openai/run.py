"""One episode's calls: each becomes a generation, an answer for the agent and a part of the trajectory."""

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, ParamSpec

from infra.clock import now
from infra.rpc import RpcError
from tasks.environment.chat_template import Message, TemplateError
from tasks.environment.config import DomainConfig
from tasks.environment.episode import AbortSwitch, malformed
from tasks.environment.openai.agent_text import AgentText
from tasks.environment.openai.answers import Answered
from tasks.environment.openai.conversations import Answer, Call, Conversations
from tasks.environment.openai.requests import ChatRequest, CompletionRequest, Refused, Sampling
from tasks.environment.openai.tool_calls import Response, ToolCall, error_message, first_only, take_apart
from tasks.environment.rendering import Ids
from tasks.rollout.engines.base import Generation
from tasks.trajectory import StopReason, Turn

Asks = ParamSpec("Asks")
Generate = Callable[[int, Ids, int, int], Awaitable[Generation]]
"""(session of the trajectory, context, tokens at most, index of the turn) -> what was sampled."""

_ENDING = {"stale": StopReason.STALE, "cancelled": StopReason.CANCELLED}


class AgentRun:
    """Serves one agent's calls, any number at a time, until the episode is over.

    `over` is set when the control plane or a fault of the inference side ends the episode; `stop` says why.
    """

    def __init__(
        self,
        domain: DomainConfig,
        generate: Generate,
        text: AgentText,
        context_limit: int | None,
        max_tool_repairs: int = 2,
    ):
        self._domain = domain
        self._generate = generate
        self._text = text
        self._limit = min(domain.max_tokens, context_limit or domain.max_tokens)
        self._context_limit = context_limit
        self._repairs = max_tool_repairs
        self.conversations = Conversations(text)
        self.over = asyncio.Event()
        self.stop: StopReason | None = None
        self.refused_for: StopReason | None = None
        """The budget that ran out, once a call was refused for it."""
        self.error = ""
        self.turns = 0
        self.ignored: Counter[str] = Counter()
        self._switch: AbortSwitch | None = None
        self._generating = 0
        self._busy_since = 0.0
        self.waited_s = 0.0
        """Seconds in which at least one generation was under way."""

    def watch(self, switch: AbortSwitch) -> None:
        """Tell `switch` when a generation is under way, and heed it."""
        self._switch = switch

    def end(self, stop: StopReason) -> None:
        """Refuse every further call, and the answers of those under way."""
        if self.stop is None:
            self.stop = stop
        self.over.set()

    async def chat(self, request: ChatRequest, created: int) -> Answered:
        """Raises `Refused`."""
        self._check_open()
        call = _rendered(self.conversations.begin, request.asked)
        schemas = request.asked.schemas if request.parse_tools else {}
        repairs = 0
        while True:
            generation, turn = await self._sample(call, request.sampling)
            response = take_apart(turn.action, schemas)
            wrong = response.malformed
            if (
                wrong
                and not response.calls
                and repairs < self._repairs
                and self.turns < self._domain.max_turns
            ):
                answer = self._answered(call, generation, turn, self._plain(turn.action), None, ())
                repairs += 1
                call, text = _rendered(self._repair, answer, request, error_message(wrong)), call
                if len(call.context) < self._limit:
                    continue
                self.conversations.dropped(call)
                shown = _message(response, turn.action)
                self.conversations.shown(answer, request.asked, shown)
                finish = _finish(turn.stop)
                return self._answer("chatcmpl", request.sampling, created, text, generation, shown, finish)
            if request.one_call:
                response = first_only(response)
                wrong = response.malformed
            shown = _message(response, turn.action)
            whole = self._text.decode(generation.tokens)
            said = self._plain(whole) if wrong or whole != turn.action else self._said(shown)
            errors = ({"role": "tool", "content": error_message(wrong), "tool_call_id": ""},) if wrong else ()
            self._answered(call, generation, turn, said, shown, errors if response.calls else ())
            finish = "tool_calls" if shown.get("tool_calls") else _finish(turn.stop)
            return self._answer("chatcmpl", request.sampling, created, call, generation, shown, finish)

    async def complete(self, request: CompletionRequest, created: int) -> Answered:
        """Raises `Refused`."""
        self._check_open()
        call = _rendered(self.conversations.begin_completion, request.prompt)
        generation, turn = await self._sample(call, request.sampling)
        shown: Message = {"role": "assistant", "content": turn.action}
        self._answered(call, generation, turn, shown, shown, ())
        finish = _finish(turn.stop)
        return self._answer("cmpl", request.sampling, created, call, generation, shown, finish)

    def prompt_text(self, request: CompletionRequest) -> str:
        prompt = request.prompt
        return prompt if isinstance(prompt, str) else self._text.raw(prompt)

    # ---- inside

    def _check_open(self) -> None:
        aborted = self._switch.reason if self._switch is not None else None
        if self.stop is not None or aborted is not None:
            raise _over(self.stop or aborted)
        if self.turns >= self._domain.max_turns:
            self.refused_for = self.refused_for or StopReason.MAX_TURNS
            raise Refused(429, "turns_exhausted", f"the episode had its {self._domain.max_turns} turns")

    def _repair(self, answer: Answer, request: ChatRequest, error: str) -> Call:
        message: Message = {"role": "tool", "content": error, "tool_call_id": ""}
        try:
            return self.conversations.follow(answer, request.asked, [message])
        except TemplateError:
            return self.conversations.follow(answer, request.asked, [{"role": "user", "content": error}])

    async def _sample(self, call: Call, sampling: Sampling) -> tuple[Generation, Turn]:
        """The generation, cut at a stop text, and its turn. On any error the call is dropped."""
        try:
            return await self._sampled(call, sampling)
        except BaseException as error:
            self.conversations.dropped(call, cut_off=isinstance(error, asyncio.CancelledError))
            raise

    async def _sampled(self, call: Call, sampling: Sampling) -> tuple[Generation, Turn]:
        room = self._limit - len(call.context)
        if room <= 0:
            tight = self._context_limit is not None and self._context_limit < self._domain.max_tokens
            stop = StopReason.CONTEXT_OVERFLOW if tight else StopReason.MAX_TOKENS
            self.refused_for = self.refused_for or stop
            raise _too_long(len(call.context), self._limit)
        budget = min(room, self._domain.max_turn_tokens, sampling.max_tokens or room)
        index, self.turns = self.turns, self.turns + 1
        self.ignored.update(sampling.ignored)
        asked = self._enter()
        try:
            generation = await self._generate(call.session, call.context, budget, index)
        except RpcError as error:
            raise self._failed(error, len(call.context)) from error
        except TimeoutError:
            self._fault("no generation within rollout.generate_limit_s")
            raise _over(self.stop) from None
        finally:
            self._leave()
        problem = malformed(generation, budget)
        if problem:
            self._fault(problem)
            raise _over(self.stop)
        generation, action = self._cut(generation, sampling.stops)
        turn = Turn(0, 0, generation.stop, action, generate_seconds=now() - asked)
        if generation.stop.is_aborted or self.stop is not None:
            if len(generation.tokens):
                said = self._plain(action)
                self.conversations.answered(call, generation, turn, said=said, shown=None)
            self.end(self.stop or generation.stop)
            raise _over(self.stop)
        return generation, turn

    def _cut(self, generation: Generation, stops: tuple[str, ...]) -> tuple[Generation, str]:
        """End it with the token that completes the first stop text; the text returned ends before that.

        What was sampled after it is forgotten: the log-probabilities of the rest do not depend on it.
        """
        text = self._text.decode(generation.tokens)
        places = [place for stop in stops if (place := text.find(stop)) >= 0]
        if not places:
            return generation, text
        kept = 1
        while not any(stop in self._text.decode(generation.tokens[:kept]) for stop in stops):
            kept += 1
        cut = replace(
            generation,
            tokens=generation.tokens[:kept],
            logprobs=generation.logprobs[:kept],
            versions=generation.versions[:kept],
            stop=generation.stop if generation.stop.is_aborted else StopReason.STOP,
        )
        return cut, text[: min(places)]

    def _failed(self, error: RpcError, length: int) -> Refused:
        if error.code == "context_overflow":
            self.refused_for = self.refused_for or StopReason.CONTEXT_OVERFLOW
            return _too_long(length, self._limit)
        if error.code in _ENDING:
            self.error = str(error)
            self.end(_ENDING[error.code])
        else:
            self._fault(str(error))
        return _over(self.stop)

    def _fault(self, error: str) -> None:
        self.error = error
        self.end(StopReason.GENERATION_ERROR)

    def _enter(self) -> float:
        if self._generating == 0:
            self._busy_since = now()
        self._generating += 1
        if self._switch is not None:
            self._switch.generating = True
        return now()

    def _leave(self) -> None:
        self._generating -= 1
        if self._generating == 0:
            self.waited_s += now() - self._busy_since
            if self._switch is not None:
                self._switch.generating = False
                if self._switch.reason is not None:
                    self.stop = self.stop or self._switch.reason
                    self.over.set()

    def _answered(
        self,
        call: Call,
        generation: Generation,
        turn: Turn,
        said: Message,
        shown: Message | None,
        errors: tuple[Message, ...],
    ) -> Answer:
        return self.conversations.answered(call, generation, turn, said=said, shown=shown, errors=errors)

    def _plain(self, action: str) -> Message:
        return {"role": "assistant", "content": self._text.response_start + action}

    def _said(self, shown: Message) -> Message:
        return {**shown, "content": self._text.response_start + shown["content"]}

    def _answer(
        self,
        kind: str,
        sampling: Sampling,
        created: int,
        call: Call,
        generation: Generation,
        shown: Message,
        finish: str,
    ) -> Answered:
        logprobs = None
        if sampling.logprobs:
            texts = [self._text.raw(generation.tokens[i : i + 1]) for i in range(len(generation.tokens))]
            logprobs = tuple(zip(texts, generation.logprobs.tolist(), strict=True))
        return Answered(
            id=f"{kind}-{secrets.token_hex(12)}",
            created=created,
            model=sampling.model,
            message=shown,
            finish=finish,
            prompt_tokens=len(call.context),
            completion_tokens=len(generation.tokens),
            logprobs=logprobs,
            ignored=sampling.ignored,
        )


def _message(response: Response, action: str) -> Message:
    """The agent's copy of a response. One whose calls are all malformed is text."""
    if not response.calls:
        return {"role": "assistant", "content": action}
    return {
        "role": "assistant",
        "content": response.content,
        "tool_calls": [_tool_call(call) for call in response.calls],
    }


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
    }


def _rendered(begin: Callable[Asks, Call], *args: Asks.args, **kwargs: Asks.kwargs) -> Call:
    try:
        return begin(*args, **kwargs)
    except TemplateError as error:
        raise Refused(400, "messages_refused", str(error), "messages") from None


def _finish(stop: StopReason) -> str:
    return "length" if stop is StopReason.LENGTH else "stop"


def _too_long(length: int, limit: int) -> Refused:
    message = f"the context of {length} tokens leaves none of {limit} to sample"
    return Refused(400, "context_length_exceeded", message, "messages")


def _over(stop: StopReason | None) -> Refused:
    if stop is StopReason.GENERATION_ERROR:
        return Refused(503, "generation_failed", "the inference side failed; the episode is over")
    reason = stop.value if stop is not None else "ended"
    return Refused(410, "episode_over", f"the episode of this key is over ({reason})")
