"""What an agent's messages look like to the policy: its tokenizer's chat template, tools included.

Where the template has no place for tools, they are written in a plain format that any policy can be taught:
a section of the system message (of the first user message, where there is no place for a system message
either) describes them, calls stand in the response between `<tool_call>` and `</tool_call>`, and results
come as a user's message between `<tool_response>` and `</tool_response>`.
"""

import json
from collections.abc import Sequence
from typing import Any

from tasks.environment.chat_template import Message, TemplateError
from tasks.environment.openai.tool_calls import Schemas, take_apart
from tasks.environment.rendering import ChatRenderer, Ids

Tools = Sequence[dict[str, Any]]
"""As the OpenAI API writes them: `{"type": "function", "function": {"name", "description", ...}}`."""

_PROBE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_of_the_template",
        "description": "none",
        "parameters": {"type": "object", "properties": {}},
    },
}
_INSTRUCTIONS = (
    "You may call tools. Each is described by a line of JSON:\n{tools}\n"
    'To call one, write <tool_call>{{"name": NAME, "arguments": {{...}}}}</tool_call>.'
)


class AgentText:
    """Conversations as text and ids, for `conversations.Conversations`. Use it from one thread."""

    def __init__(self, renderer: ChatRenderer):
        self._renderer = renderer
        self._template = renderer.template
        self.response_start = self._template.response_start
        """What asking for a response writes of it, which belongs before its text in history."""
        self._has_tools = self._takes_tools()
        self._has_system = self._shows([{"role": "system", "content": "probe_of_the_template"}])

    @property
    def plain_tools(self) -> bool:
        """Whether tools are written in the plain format, for want of a place in the template."""
        return not self._has_tools

    def text(self, messages: Sequence[Message], tools: Tools, ask: bool) -> str:
        """The conversation; with `ask`, followed by what asks for a response. Raises `TemplateError`."""
        if self._has_tools:
            return self._template.text([_with_objects(message) for message in messages], ask, tools)
        return self._template.text(self._plain(list(messages), tools), ask)

    def encode(self, text: str) -> Ids:
        return self._renderer.encode(text)

    def raw(self, ids: Ids) -> str:
        """Ids as text, special tokens written out."""
        return self._renderer.raw(ids)

    def decode(self, ids: Ids) -> str:
        """Ids as text, without special tokens."""
        return self._renderer.decode(ids)

    def closing(self, rendered: str, response: Ids, schemas: Schemas) -> Ids | None:
        """What has to follow `response` for it to stand in history as `rendered` does there.

        `rendered` is what the template makes of the response's message: its text, the end token, and what
        comes after. None where it says something else than what was sampled, white space and the layout of
        tool calls apart, or has no end token.
        """
        ids = self.encode(rendered)
        ends = [index for index, token in enumerate(ids.tolist()) if token in self._renderer.end_tokens]
        if not ends:
            return None
        wrote = take_apart(self.decode(ids[: ends[-1]]), schemas)
        sampled = take_apart(self.decode(response), schemas)
        same = (wrote.content.strip(), wrote.calls) == (sampled.content.strip(), sampled.calls)
        if not same or len(wrote.malformed) != len(sampled.malformed):
            return None
        ended = len(response) > 0 and int(response[-1]) in self._renderer.end_tokens
        return ids[ends[-1] + ended :]

    def _takes_tools(self) -> bool:
        """Whether the template shows tools, the calls of a response, and their results."""
        call = {"id": "call12345", "type": "function", "function": {"name": "called", "arguments": "{}"}}
        messages: list[Message] = [
            {"role": "user", "content": "A"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call12345", "name": "called", "content": "resulted"},
        ]
        try:
            text = self._template.text([_with_objects(message) for message in messages], True, [_PROBE])
        except (TemplateError, TypeError):
            return False
        return all(word in text for word in (_PROBE["function"]["name"], "called", "resulted"))

    def _shows(self, messages: list[Message]) -> bool:
        try:
            return "probe_of_the_template" in self._template.text(
                [*messages, {"role": "user", "content": "A"}], True
            )
        except TemplateError:
            return False

    def _plain(self, messages: list[Message], tools: Tools) -> list[Message]:
        plain = [_in_plain_format(message) for message in messages]
        if tools:
            section = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool["function"]) for tool in tools))
            if plain and plain[0]["role"] == "system":
                plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n\n{section}"}
            else:
                plain.insert(0, {"role": "system", "content": section})
        if not self._has_system and len(plain) > 1 and plain[0]["role"] == "system":
            system, first, *others = plain
            plain = [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *others]
        return plain


def _with_objects(message: Message) -> Message:
    """Templates write the arguments of a call themselves, from an object."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError:
            arguments = function["arguments"]
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _in_plain_format(message: Message) -> Message:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = _with_objects(message).get("tool_calls") or []
    written = [
        "<tool_call>"
        + json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]})
        + "</tool_call>"
        for call in calls
    ]
    return {"role": message["role"], "content": "\n".join([part for part in (content, *written) if part])}
