"""Tool calls in a response's text, and what is wrong with those that cannot be run. Pure.

Three ways of writing them are read, whatever the template asks for:

    Hermes, Qwen     <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, any number, amid text
    Llama 3          the whole response is {"name": "add", "parameters": {"a": 1}}, or several after `;`
    Python           the whole response is [add(a=1), add(a=2)] with literal arguments

The last two have no mark of their own, so they count only when they name a tool that was offered.
"""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry
from referencing.exceptions import Unresolvable

Schemas = Mapping[str, dict[str, Any]]
"""JSON schema of each offered tool's arguments, by its name."""

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    text: str  # as the policy wrote it
    error: str  # for the policy to read


@dataclass(frozen=True, slots=True)
class Response:
    """A response taken apart: what it says beside its calls, and its calls."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()


def check_schema(name: str, schema: dict[str, Any]) -> None:
    """Raises ValueError where `schema`, of the arguments of tool `name`, is not a JSON schema."""
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"the parameters of tool {name!r} are not a JSON schema: {error.message}") from None


def take_apart(text: str, tools: Schemas) -> Response:
    """The calls in a response. Without tools all of it is content."""
    if not tools:
        return Response(text)
    found = _TAGGED.findall(text)
    if found:
        content = _TAGGED.sub("", text).strip()
        return _checked(content, [(each, _read_json(each)) for each in found], tools)
    bare = _bare_json(text.strip(), tools) or _python(text.strip(), tools)
    return _checked("", bare, tools) if bare else Response(text)


def error_message(malformed: tuple[MalformedCall, ...]) -> str:
    """What the policy is told of its malformed calls."""
    return "\n".join(f"Error: {each.error}. This call was not run: {each.text}" for each in malformed)


def first_only(response: Response) -> Response:
    """As the response to an agent that takes one call at a time: the others are not run."""
    surplus = [
        MalformedCall(json.dumps({"name": call.name, "arguments": call.arguments}), "one tool call at a time")
        for call in response.calls[1:]
    ]
    return Response(response.content, response.calls[:1], (*response.malformed, *surplus))


_Read = dict[str, Any] | str
"""A call as an object, or what is wrong with it."""


def _read_json(text: str) -> _Read:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return f"the tool call is not JSON ({error})"
    return value if isinstance(value, dict) else "a tool call must be a JSON object"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _checked(content: str, read: list[tuple[str, _Read]], tools: Schemas) -> Response:
    calls, malformed = [], []
    for text, value in read:
        call = value if isinstance(value, str) else _call(value, tools)
        if isinstance(call, str):
            malformed.append(MalformedCall(text, call))
        else:
            calls.append(call)
    return Response(content, tuple(calls), tuple(malformed))


def _call(value: dict[str, Any], tools: Schemas) -> ToolCall | str:
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return "the tool call has no name"
    if name not in tools:
        return f"there is no tool {name!r}; the tools are {', '.join(sorted(tools))}"
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _read_json(arguments)
        if isinstance(arguments, str):
            return f"the arguments of {name!r} are not a JSON object"
    if not isinstance(arguments, dict):
        return f"the arguments of {name!r} are not a JSON object"
    # An empty registry: what a schema refers to outside itself is never fetched.
    validator = Draft202012Validator(tools[name], registry=Registry())
    try:
        problem = best_match(validator.iter_errors(arguments))
    except Unresolvable as error:
        return f"the schema of {name!r} refers to what is not in it: {error}"
    if problem is not None:
        where = "".join(f".{part}" for part in problem.absolute_path)
        return f"the arguments{where} of {name!r} do not fit: {problem.message}"
    return ToolCall(name, arguments)


def _bare_json(text: str, tools: Schemas) -> list[tuple[str, _Read]]:
    read: list[tuple[str, _Read]] = []
    decoder = json.JSONDecoder()
    position = 0
    while position < len(text):
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return []
        if not isinstance(value, dict) or value.get("name") not in tools:
            return []
        read.append((text[position:end], value))
        position = end + len(text[end:]) - len(text[end:].lstrip("; \n"))
    return read


def _python(text: str, tools: Schemas) -> list[tuple[str, _Read]]:
    if not (text.startswith("[") and text.endswith("]")):
        return []
    try:
        parsed = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    elements = parsed.elts if isinstance(parsed, ast.List) else []
    read: list[tuple[str, _Read]] = []
    for element in elements:
        if not (isinstance(element, ast.Call) and isinstance(element.func, ast.Name)):
            return []
        if element.func.id not in tools:
            return []
        read.append((ast.unparse(element), _python_call(element.func.id, element)))
    return read


def _python_call(name: str, call: ast.Call) -> _Read:
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        return f"the arguments of {name!r} must be given by name"
    try:
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        json.dumps(arguments, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return f"the arguments of {name!r} must be literals of JSON's types"
    return {"name": name, "arguments": arguments}
