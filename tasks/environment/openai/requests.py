"""What an agent sends, checked, and the refusals it can get. Pure.

Options that would change the distribution sampled from (`temperature`, `top_p`, penalties, `logit_bias`) or
the draws (`seed`) are ignored: the policy samples with the campaign's temperature and the trajectory's own
seed, so that its log-probabilities are those of what was sampled from and members of a group differ. Which
were ignored is said in the answer and in the trajectory's info. What an agent would rely on and cannot get is
refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasks.environment.chat_template import Message
from tasks.environment.openai.conversations import Asked
from tasks.environment.openai.tool_calls import check_schema
from tasks.environment.rendering import Ids

_NEUTRAL: dict[str, Any] = {
    "temperature": None,
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "seed": None,
}
"""Options that are ignored, unless they are neutral."""


class Refused(Exception):
    """The call is answered with an error in OpenAI's form. Clients do not try it again."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a request says beside its prompt."""

    model: str
    max_tokens: int | None
    stops: tuple[str, ...]
    logprobs: bool
    stream: bool
    usage_in_stream: bool
    ignored: tuple[str, ...]  # options that had no effect


@dataclass(frozen=True, slots=True)
class ChatRequest:
    asked: Asked
    sampling: Sampling
    parse_tools: bool  # False where `tool_choice` is "none"
    one_call: bool  # `parallel_tool_calls` is false


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    prompt: str | Ids
    sampling: Sampling
    echo: bool


def chat_request(body: Any) -> ChatRequest:
    """Raises `Refused` with status 400."""
    body = _object(body)
    tools = tuple(_tool(tool, index) for index, tool in enumerate(_list(body, "tools")))
    messages = tuple(normal(message, index) for index, message in enumerate(_list(body, "messages")))
    if not messages:
        raise _bad("messages", "must hold at least one message")
    choice = body.get("tool_choice") or ("auto" if tools else "none")
    if choice not in ("auto", "none"):
        raise _bad("tool_choice", "must be 'auto' or 'none': sampling is not constrained to a tool")
    if _get(body, "response_format", {"type": "text"}).get("type") != "text":
        raise _bad("response_format", "must be text: sampling is not constrained to a format")
    if body.get("functions") or body.get("function_call"):
        raise _bad("functions", "is the old form of `tools`: use that")
    if _get(body, "top_logprobs", 0) != 0:
        raise _bad("top_logprobs", "must be 0: only what was sampled has a log-probability")
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    limit = body.get("max_completion_tokens")
    return ChatRequest(
        Asked(messages, tools, schemas),
        _sampling(body, limit if limit is not None else body.get("max_tokens"), bool(body.get("logprobs"))),
        choice == "auto",
        body.get("parallel_tool_calls") is False,
    )


def completion_request(body: Any) -> CompletionRequest:
    """Raises `Refused` with status 400."""
    body = _object(body)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        prompt = np.array(prompt, np.int64).astype(np.int32)
    elif not isinstance(prompt, str) or not prompt:
        raise _bad("prompt", "must be one text or one list of token ids, and not empty")
    if body.get("suffix"):
        raise _bad("suffix", "is not supported")
    if _get(body, "best_of", 1) != 1:
        raise _bad("best_of", "must be 1")
    logprobs = body.get("logprobs")
    if logprobs not in (None, False, 0):
        raise _bad("logprobs", "must be 0: only what was sampled has a log-probability")
    limit = body.get("max_tokens")
    return CompletionRequest(prompt, _sampling(body, limit, logprobs is not None), bool(body.get("echo")))


def taking(body: Any) -> tuple[str | None, float]:
    """Of a process that wants an episode: the domain, any where it is None, and how long it waits (s)."""
    body = _object(body)
    domain, wait_s = body.get("domain"), body.get("wait_s", 20)
    if domain is not None and not isinstance(domain, str):
        raise _bad("domain", "must be a name")
    if type(wait_s) not in (int, float) or not 0 <= wait_s <= 600:
        raise _bad("wait_s", "must be a number of seconds up to 600")
    return domain, float(wait_s)


def normal(message: Any, index: int) -> Message:
    """A message in our own form: content is text, and nothing is there that a template would not use."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _bad(where, "must be an object with a role")
    role = {"developer": "system"}.get(message["role"], message["role"])
    if role not in ("system", "user", "assistant", "tool"):
        raise _bad(f"{where}.role", f"is {role!r}: it must be system, developer, user, assistant or tool")
    found: Message = {"role": role, "content": _content(message.get("content"), where)}
    if role == "assistant" and message.get("tool_calls"):
        found["tool_calls"] = [_call(call, where) for call in message["tool_calls"]]
    if role == "tool":
        found["tool_call_id"] = str(message.get("tool_call_id") or "")
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    return found


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(f"{where}.content", "must be text or a list of parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise _bad(f"{where}.content", "may have parts of type text only")
        texts.append(text)
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _bad(f"{where}.tool_calls", "must be calls of functions")
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        raise _bad(f"{where}.tool_calls", "must have arguments as text of JSON")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tool(tool: Any, index: int) -> dict[str, Any]:
    where = f"tools[{index}]"
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _bad(where, "must be of type function, with a name")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    try:
        check_schema(function["name"], parameters)
    except ValueError as error:
        raise _bad(f"{where}.function.parameters", str(error)) from None
    described = {"name": function["name"], "description": function.get("description") or ""}
    return {"type": "function", "function": {**described, "parameters": parameters}}


def _sampling(body: Mapping[str, Any], max_tokens: Any, logprobs: bool) -> Sampling:
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise _bad("max_tokens", "must be a positive whole number")
    if _get(body, "n", 1) != 1:
        raise _bad("n", "must be 1: ask several times for several samples")
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _bad("stop", "must be a text or a list of texts")
    return Sampling(
        model=str(body.get("model") or "policy"),
        max_tokens=max_tokens,
        stops=tuple(stops),
        logprobs=logprobs,
        stream=bool(body.get("stream")),
        usage_in_stream=bool(_get(body, "stream_options", {}).get("include_usage")),
        ignored=tuple(name for name, neutral in _NEUTRAL.items() if body.get(name) not in (None, neutral)),
    )


def _object(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        raise Refused(400, "invalid_json", "the body must be a JSON object")
    return body


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name) or []
    if not isinstance(value, list):
        raise _bad(name, "must be a list")
    return value


def _get(body: Mapping[str, Any], name: str, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(default, dict) and not isinstance(value, Mapping):
        raise _bad(name, "must be an object")
    return value


def _bad(param: str, problem: str) -> Refused:
    return Refused(400, "invalid_value", f"{param} {problem}", param)
