"""What an agent gets: objects of OpenAI's API, whole or as the chunks of a stream. Pure.

The token API returns turns whole, so a stream begins when its turn is over; its chunks are the turn's parts.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tasks.environment.chat_template import Message

_PIECE = 48  # characters of a delta


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer. `message` is the agent's copy of the response, `logprobs` (text, logprob) a token."""

    id: str
    created: int  # seconds since the epoch
    model: str
    message: Message
    finish: str  # "stop", "length" or "tool_calls"
    prompt_tokens: int
    completion_tokens: int
    logprobs: tuple[tuple[str, float], ...] | None
    ignored: tuple[str, ...]

    @property
    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


def chat_completion(answered: Answered) -> dict[str, Any]:
    message = {"role": "assistant", "content": answered.message["content"] or None, "refusal": None}
    if answered.message.get("tool_calls"):
        message["tool_calls"] = answered.message["tool_calls"]
    else:
        message["content"] = answered.message["content"]
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": answered.finish,
        "logprobs": _chat_logprobs(answered),
    }
    return {**_head(answered, "chat.completion"), "choices": [choice], "usage": answered.usage}


def chat_chunks(answered: Answered, with_usage: bool) -> Iterator[bytes]:
    """Server-sent events, the closing `[DONE]` among them."""
    head = _head(answered, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return _event({**head, "choices": [choice], **({"usage": None} if with_usage else {})})

    yield chunk({"role": "assistant", "content": ""}, logprobs=_chat_logprobs(answered))
    for piece in _pieces(answered.message["content"]):
        yield chunk({"content": piece})
    for index, call in enumerate(answered.message.get("tool_calls") or ()):
        function = {"name": call["function"]["name"], "arguments": ""}
        yield chunk({"tool_calls": [{**call, "index": index, "function": function}]})
        for piece in _pieces(call["function"]["arguments"]):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, answered.finish)
    if with_usage:
        yield _event({**head, "choices": [], "usage": answered.usage})
    yield b"data: [DONE]\n\n"


def completion(answered: Answered, echo: str = "") -> dict[str, Any]:
    """`echo` is the prompt where the request wants it repeated."""
    choice = {
        "index": 0,
        "text": echo + answered.message["content"],
        "finish_reason": answered.finish,
        "logprobs": _completion_logprobs(answered, len(echo)),
    }
    return {**_head(answered, "text_completion"), "choices": [choice], "usage": answered.usage}


def completion_chunks(answered: Answered, with_usage: bool, echo: str = "") -> Iterator[bytes]:
    """Server-sent events, the closing `[DONE]` among them."""
    head = _head(answered, "text_completion")

    def chunk(text: str, finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": logprobs}
        return _event({**head, "choices": [choice], **({"usage": None} if with_usage else {})})

    for piece in _pieces(echo + answered.message["content"]):
        yield chunk(piece)
    yield chunk("", answered.finish, _completion_logprobs(answered, len(echo)))
    if with_usage:
        yield _event({**head, "choices": [], "usage": answered.usage})
    yield b"data: [DONE]\n\n"


def _head(answered: Answered, kind: str) -> dict[str, Any]:
    return {
        "id": answered.id,
        "object": kind,
        "created": answered.created,
        "model": answered.model,
        "tutti": {"ignored": list(answered.ignored)},
    }


def _chat_logprobs(answered: Answered) -> dict[str, Any] | None:
    if answered.logprobs is None:
        return None
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in answered.logprobs
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(answered: Answered, offset: int) -> dict[str, Any] | None:
    if answered.logprobs is None:
        return None
    offsets = []
    for text, _ in answered.logprobs:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": [text for text, _ in answered.logprobs],
        "token_logprobs": [logprob for _, logprob in answered.logprobs],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
