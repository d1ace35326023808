"""A tokenizer's chat template as text, and what kind of template it is.

A template *keeps the prefix* when adding a message never changes the text before it; then what it adds can be
appended to the ids that are there. Templates of reasoning models often do not: they drop earlier thinking, or
ask for a response with text that does not stand before one in history.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError as JinjaError

Message = dict[str, Any]
"""`role` and `content`; of an agent's calls also `tool_calls`, `tool_call_id` and `name`."""

_USER = {"role": "user", "content": "A"}
_ASSISTANT = {"role": "assistant", "content": "B"}
_THOUGHTFUL = {"role": "assistant", "content": "<think>\nT\n</think>\n\nB"}


class TemplateError(ValueError):
    """The tokenizer's chat template cannot serve the episodes; the message names the option to change."""


@dataclass(frozen=True, slots=True)
class PrefixKeeping:
    """Of a template that keeps the prefix: what stands between a response and what the next message adds."""

    end: int  # the token that ends a response
    after_end: list[int]  # between that token and the next message
    base: str  # a short conversation that ends with a response


class ChatTemplate:
    """The chat template of one tokenizer, with its options (for example `enable_thinking` of Qwen3)."""

    def __init__(self, directory: Path, tokenizer: Any, options: Mapping[str, Any] | None = None):
        self._directory = directory
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        asked = self.text([_USER], ask=True)
        self.response_start: str = asked[_common(asked, self.text([_USER, _ASSISTANT])) :]
        """What asking for a response writes of the response itself, such as an opening `<think>`."""

    def text(
        self, messages: Sequence[Message], ask: bool = False, tools: Sequence[dict[str, Any]] | None = None
    ) -> str:
        """The conversation; with `ask`, followed by what asks for a response. Raises `TemplateError`."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=ask,
                **self._options,
            )
        except JinjaError as error:
            roles = " ".join(message["role"] for message in messages)
            hint = "leave domains.*.system_prompt empty or " if messages[0]["role"] == "system" else ""
            raise TemplateError(
                f"model.path {self._directory}: its chat template refuses the roles {roles} ({error}): "
                f"{hint}give the tokenizer another chat_template"
            ) from error
        return text

    def conversation(self, turns: Sequence[tuple[str, str]], system: str | None) -> list[Message]:
        """Messages of (role, content); a response gets back what asking for it wrote of it."""
        messages = [{"role": "system", "content": system}] if system else []
        for role, content in turns:
            start = self.response_start if role == "assistant" else ""
            messages.append({"role": role, "content": start + content})
        return messages

    def prefix_keeping(
        self, encode: Callable[[str], list[int]], end_tokens: frozenset[int]
    ) -> PrefixKeeping | None:
        """What to append after a response; None where the template does not keep the prefix.

        Tested on ids, in the first turn and in a later one, with a plain response and a thoughtful one.
        Raises `TemplateError` when the template ends a response with none of the end tokens.
        """
        asked = encode(self.text([_USER], ask=True))
        base_text = self.text([_USER, _ASSISTANT])
        base = encode(base_text)
        response = base[_common(asked, base) :]
        ends = [index for index, token in enumerate(response) if token in end_tokens]
        if not ends:
            raise TemplateError(
                f"model.path {self._directory}: the chat template ends a response with none of the end "
                f"tokens {sorted(end_tokens)} of tokenizer and generation_config.json: add the one it writes "
                "to eos_token_id there, or give the tokenizer another chat_template"
            )
        added = [self._added([_USER, first], [_USER]) for first in (_ASSISTANT, _THOUGHTFUL)] + [
            self._added([_USER, _ASSISTANT, _USER, _ASSISTANT], [_USER])
        ]
        second = added[0]
        if (
            second is None
            or any(text != second for text in added)
            or base[: len(asked)] != asked
            or encode(base_text + second) != [*base, *encode(second)]
        ):
            return None
        return PrefixKeeping(response[ends[-1]], response[ends[-1] + 1 :], base_text)

    def _added(self, before: list[Message], more: list[Message]) -> str | None:
        base, whole = self.text(before), self.text([*before, *more], ask=True)
        return whole[len(base) :] if whole.startswith(base) else None


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common prefix."""
    unequal = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(unequal, min(len(one), len(other)))
