"""From the calls of one agent to the segments of its trajectory. Pure.

Every call brings a whole list of messages. If it goes on from a response that we gave, the ids of that
response are kept as they were sampled, and only what the template adds is appended:

- to the same segment, when that response is its last and no other call is at work on it;
- to a copy of the context up to there otherwise (parallel calls, another continuation of the same history),
  a new segment in which nothing copied counts as sampled.

A call that begins with no response of ours, an edited history, or a template that changes what stands before
the new messages, begins a new segment from text. So each response is sampled, and trained, in one segment
only, and every segment is exactly what the engine was given and answered.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tasks.environment.chat_template import Message
from tasks.environment.openai.agent_text import Tools
from tasks.environment.openai.tool_calls import Schemas
from tasks.environment.rendering import Ids
from tasks.rollout.engines.base import Generation
from tasks.trajectory import NOT_GENERATED, Turn


class Text(Protocol):
    """`agent_text.AgentText`, as conversations need it."""

    response_start: str

    def text(self, messages: Sequence[Message], tools: Tools, ask: bool) -> str: ...

    def encode(self, text: str) -> Ids: ...

    def raw(self, ids: Ids) -> str: ...

    def closing(self, rendered: str, response: Ids, schemas: Schemas) -> Ids | None: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What an agent asks with: messages in our own form (`requests.normal`), and the tools it offers."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, object], ...] = ()
    schemas: Schemas = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """A generation to ask for: the engine's `session` gets `context`. No two open calls have one session."""

    segment: int
    session: int
    context: Ids
    asked: Asked
    messages: tuple[Message, ...]  # as the policy sees them; differs from `asked` where errors were inserted
    text: str  # of the context
    ahead: Ids  # the part of the context that the segment does not hold yet


@dataclass(slots=True)
class Answer:
    """A point of a conversation: right after a response."""

    segment: int
    end: int  # tokens of its segment up to here
    response: Ids
    messages: tuple[Message, ...]  # as the policy sees them, the response last
    text: str  # of the context and the response
    errors: tuple[Message, ...]  # to stand after the results of the response's other tool calls


class Segment:
    """Arrays of equal length, as a trajectory's. `turns` count from the segment's start."""

    def __init__(self, copied: Ids, session: int):
        self.session = session
        self.tokens: Ids = copied
        self.logprobs = np.zeros(len(copied), np.float32)
        self.versions = np.full(len(copied), NOT_GENERATED, np.int32)
        self.turns: list[Turn] = []
        self.busy = False

    @property
    def sampled(self) -> bool:
        return bool((self.versions != NOT_GENERATED).any())

    def _append(self, ahead: Ids, generation: Generation) -> None:
        nothing = len(ahead)
        self.tokens = np.concatenate([self.tokens, ahead, generation.tokens])
        self.logprobs = np.concatenate([self.logprobs, np.zeros(nothing, np.float32), generation.logprobs])
        blank = np.full(nothing, NOT_GENERATED, np.int32)
        self.versions = np.concatenate([self.versions, blank, generation.versions])


class Conversations:
    """Begin a call, then say how it ended: `answered` or `dropped`."""

    def __init__(self, text: Text):
        self._text = text
        self.segments: list[Segment] = []
        self._sessions = 0
        self._answers: dict[bytes, list[Answer]] = {}
        self._completions: list[Answer] = []

    def begin(self, asked: Asked) -> Call:
        """A chat call. Raises `TemplateError` where the template refuses the messages."""
        messages = asked.messages
        for length in range(len(messages) - 1, 0, -1):
            if messages[length - 1]["role"] == "assistant":
                known = self._answers.get(_key(asked.tools, messages[:length]))
                if known:
                    added = _with_errors(messages[length:], known[-1].errors)
                    return self._follow(self._free(known), asked, added)
        return self._fresh(asked, messages)

    def begin_completion(self, prompt: str | Ids) -> Call:
        """A call without messages: its prompt goes on from an earlier prompt and its response, special tokens
        written out, or is new."""
        text = prompt if isinstance(prompt, str) else self._text.raw(prompt)
        asked = Asked(({"role": "prompt", "content": text},))
        for answer in sorted(self._completions, key=lambda each: -len(each.text)):
            begun = answer.text
            if isinstance(prompt, str) and text.startswith(begun):
                return self._extend(
                    answer, asked, asked.messages, self._text.encode(text[len(begun) :]), text
                )
            if not isinstance(prompt, str):
                held = self.segments[answer.segment].tokens[: answer.end]
                if len(prompt) >= len(held) and np.array_equal(prompt[: len(held)], held):
                    return self._extend(answer, asked, asked.messages, prompt[len(held) :], text)
        ids = self._text.encode(prompt) if isinstance(prompt, str) else prompt
        return self._new(asked, asked.messages, ids, text)

    def follow(self, answer: Answer, asked: Asked, added: Sequence[Message]) -> Call:
        """Go on from an answer that the agent has not seen, with messages of our own."""
        return self._follow(answer, asked, tuple(added))

    def answered(
        self,
        call: Call,
        generation: Generation,
        turn: Turn,
        *,
        said: Message,
        shown: Message | None,
        errors: Sequence[Message] = (),
    ) -> Answer:
        """The engine answered. `said` is the response as the template should write it in history, `shown`
        the message that the agent got (None: it got none). `turn`'s offsets are set here."""
        segment = self._release(call)
        segment._append(call.ahead, generation)
        turn.response_end = len(segment.tokens)
        turn.response_start = turn.response_end - len(generation.tokens)
        segment.turns.append(turn)
        answer = Answer(
            call.segment,
            turn.response_end,
            generation.tokens,
            (*call.messages, said),
            call.text + self._text.raw(generation.tokens),
            tuple(errors),
        )
        if shown is not None:
            self.shown(answer, call.asked, shown)
        return answer

    def shown(self, answer: Answer, asked: Asked, message: Message) -> None:
        """The agent got `message` as the answer to what it asked, and may go on from there."""
        if asked.messages[-1]["role"] == "prompt":
            self._completions.append(answer)
        else:
            self._answers.setdefault(_key(asked.tools, (*asked.messages, message)), []).append(answer)

    def dropped(self, call: Call, cut_off: bool = False) -> None:
        """Nothing came of the call: its segment is as it was.

        One that was `cut_off` may keep the engine's session busy for a while, so the segment gets another.
        """
        segment = self._release(call)
        if cut_off:
            segment.session = self._new_session()

    def _release(self, call: Call) -> Segment:
        segment = self.segments[call.segment]
        segment.busy = False
        return segment

    def _free(self, known: list[Answer]) -> Answer:
        """Of answers that read alike, one that can be continued in place, if there is one."""
        return next((answer for answer in reversed(known) if self._in_place(answer)), known[-1])

    def _in_place(self, answer: Answer) -> bool:
        segment = self.segments[answer.segment]
        return not segment.busy and len(segment.tokens) == answer.end

    def _follow(self, answer: Answer, asked: Asked, added: tuple[Message, ...]) -> Call:
        messages = (*answer.messages, *added)
        whole = self._text.text(messages, asked.tools, True)
        if whole.startswith(answer.text):
            rest = self._text.encode(whole[len(answer.text) :])
            return self._extend(answer, asked, messages, rest, whole)
        before = self._text.text(answer.messages[:-1], asked.tools, True)
        then = self._text.text(answer.messages, asked.tools, False)
        if then.startswith(before) and whole.startswith(then):
            closing = self._text.closing(then[len(before) :], answer.response, asked.schemas)
            if closing is not None:
                added_text = whole[len(then) :]
                ids = np.concatenate([closing, self._text.encode(added_text)])
                text = answer.text + self._text.raw(closing) + added_text
                return self._extend(answer, asked, messages, ids, text)
        return self._fresh(asked, messages)

    def _extend(
        self, answer: Answer, asked: Asked, messages: tuple[Message, ...], ahead: Ids, text: str
    ) -> Call:
        segment = self.segments[answer.segment]
        if not self._in_place(answer):
            self.segments.append(Segment(segment.tokens[: answer.end], self._new_session()))
            return self._call(len(self.segments) - 1, asked, messages, ahead, text)
        return self._call(answer.segment, asked, messages, ahead, text)

    def _fresh(self, asked: Asked, messages: tuple[Message, ...]) -> Call:
        text = self._text.text(messages, asked.tools, True)
        return self._new(asked, messages, self._text.encode(text), text)

    def _new(self, asked: Asked, messages: tuple[Message, ...], ids: Ids, text: str) -> Call:
        self.segments.append(Segment(np.empty(0, np.int32), self._new_session()))
        return self._call(len(self.segments) - 1, asked, messages, ids, text)

    def _call(self, index: int, asked: Asked, messages: tuple[Message, ...], ahead: Ids, text: str) -> Call:
        segment = self.segments[index]
        segment.busy = True
        context = np.concatenate([segment.tokens, ahead]).astype(np.int32)
        return Call(index, segment.session, context, asked, messages, text, ahead.astype(np.int32))

    def _new_session(self) -> int:
        self._sessions += 1
        return self._sessions - 1


def _with_errors(added: tuple[Message, ...], errors: tuple[Message, ...]) -> tuple[Message, ...]:
    """Errors of calls that were not run stand after the results of those that were."""
    results = next((i for i, message in enumerate(added) if message["role"] != "tool"), len(added))
    return (*added[:results], *errors, *added[results:])


def _key(tools: Sequence[object], messages: Sequence[Message]) -> bytes:
    """Messages are equal when they say the same: white space around it does not count."""
    said = [
        [
            message["role"],
            (message.get("content") or "").strip(),
            _calls(message),
            message.get("tool_call_id"),
        ]
        for message in messages
    ]
    return hashlib.blake2b(json.dumps([tools, said], sort_keys=True).encode(), digest_size=16).digest()


def _calls(message: Message) -> list[list[object]]:
    calls = []
    for call in message.get("tool_calls") or ():
        arguments: object = call["function"]["arguments"]
        with suppress(ValueError):
            arguments = json.loads(str(arguments))
        calls.append([call["id"], call["function"]["name"], arguments])
    return calls
