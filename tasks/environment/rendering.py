"""Messages to token ids through a chat template, without ever re-tokenising what the policy sampled.

Where the template keeps its prefix (`tasks.environment.chat_template`), what an observation adds is appended
to the ids that are there. Where it may not, the whole conversation is rendered again each turn: as long as it
begins with the text of the context so far, only the rest is appended; otherwise the context begins anew, as
what the template made of the conversation, and with it a new segment of the trajectory.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from tasks.environment.chat_template import ChatTemplate, TemplateError

__all__ = ["ChatRenderer", "Continuation", "Dialogue", "Ids", "TemplateError"]

Ids = NDArray[np.int32]
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(slots=True)
class Dialogue:
    """What an episode said so far. Observation i answers response i."""

    prompt: str
    system: str | None = None
    responses: list[Ids] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the next response is asked with."""

    ids: Ids
    fresh: bool  # a whole context, with which a new segment begins; otherwise what follows the last response


class ChatRenderer:
    """Prompts and observations as ids, and responses as text, for one tokenizer. Use it from one thread.

    Of each kind the `kept` most recently used results are remembered. Returned arrays are shared: do not
    write to them.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        multi_turn: bool = True,
        kept: int = 4096,
        options: Mapping[str, Any] | None = None,
    ):
        """Load the tokenizer of a directory in Hugging Face format; `options` go to its chat template.

        With `multi_turn`, raises `TemplateError` where the template writes no end token; without it, only
        `initial` and `decode` may be called and any template will do.
        """
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._encoder = self._tokenizer.backend_tokenizer
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._template = ChatTemplate(Path(directory), self._tokenizer, options)
        self.end_tokens = _end_tokens(Path(directory), self._tokenizer)
        self._prompts: _Recent[tuple[str, str | None], Ids] = _Recent(kept)
        self._observations: _Recent[tuple[str, bool], Ids] = _Recent(kept)
        self._texts: _Recent[bytes, str] = _Recent(kept)
        self._keeping = self._template.prefix_keeping(self._encode, self.end_tokens) if multi_turn else None

    @property
    def keeps_prefix(self) -> bool:
        """Whether every response of an episode can follow the one before it in one sequence."""
        return self._keeping is not None

    def initial(self, prompt: str, system: str | None = None) -> Ids:
        """The first context: system prompt, the prompt as the user's message, and what asks for a response.

        Raises `TemplateError` when the template has no place for a system prompt.
        """
        return self._prompts.get((prompt, system), lambda: self._initial(prompt, system))

    def follow(self, dialogue: Dialogue) -> Continuation:
        """What follows the last response of a dialogue: its end, the last observation, the next asking.

        The end token is among these ids unless the policy sampled one itself, as the last token of its
        response.
        """
        if self._keeping is not None:
            ended = self._ended(dialogue.responses[-1])
            return Continuation(self.observation(dialogue.observations[-1], ended), False)
        turns = self._turns(dialogue)
        so_far = self._text(turns[:-2], dialogue.system) + self._raw(dialogue.responses[-1])
        whole = self._text(turns, dialogue.system)
        fresh = not whole.startswith(so_far)
        return Continuation(self._ids(whole if fresh else whole[len(so_far) :]), fresh)

    def observation(self, text: str, ended: bool) -> Ids:
        """As `follow`, for a template that keeps its prefix: then only the observation matters, and whether
        the policy sampled the end token itself. Raises `TemplateError` for other templates."""
        return self._observations.get((text, ended), lambda: self._observation(text, ended))

    def decode(self, response: Ids) -> str:
        """The response as text, without special tokens."""
        return self._texts.get(response.tobytes(), lambda: self._decode(response, skip_special_tokens=True))

    @property
    def template(self) -> ChatTemplate:
        """The template itself, for conversations that are more than prompts and observations."""
        return self._template

    def encode(self, text: str) -> Ids:
        """Text, special tokens written out, as ids; nothing is added."""
        return self._ids(text)

    def raw(self, ids: Ids) -> str:
        """Ids as text, special tokens written out."""
        return self._raw(ids)

    def _initial(self, prompt: str, system: str | None) -> Ids:
        text = self._text([("user", prompt)], system)
        if system and system.strip() not in text:
            raise TemplateError(
                "the chat template of model.path leaves the system prompt out: leave domains.*.system_prompt "
                "empty, or give the tokenizer another chat_template"
            )
        return self._ids(text)

    def _observation(self, text: str, ended: bool) -> Ids:
        keeping = self._keeping
        added = None
        if keeping is not None:
            whole = self._template.text(
                [_message("user", "A"), _message("assistant", "B"), _message("user", text)], ask=True
            )
            added = whole[len(keeping.base) :] if whole.startswith(keeping.base) else None
        if keeping is None or added is None:
            raise TemplateError("the chat template of model.path does not keep the prefix: use `follow`")
        end = [] if ended else [keeping.end]
        return np.array([*end, *keeping.after_end, *self._encode(added)], np.int32)

    def _turns(self, dialogue: Dialogue) -> list[tuple[str, str]]:
        turns = [("user", dialogue.prompt)]
        for response, observation in zip(dialogue.responses, dialogue.observations, strict=True):
            turns += [("assistant", self.decode(response)), ("user", observation)]
        return turns

    def _text(self, turns: list[tuple[str, str]], system: str | None) -> str:
        return self._template.text(self._template.conversation(turns, system), ask=True)

    def _ended(self, response: Ids) -> bool:
        return len(response) > 0 and int(response[-1]) in self.end_tokens

    def _raw(self, response: Ids) -> str:
        return self._decode(response, skip_special_tokens=False)

    def _decode(self, response: Ids, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(
            response.tolist(), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def _ids(self, text: str) -> Ids:
        return np.array(self._encode(text), np.int32)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _end_tokens(directory: Path, tokenizer: Any) -> frozenset[int]:
    ends = {tokenizer.eos_token_id}
    path = directory / "generation_config.json"
    if path.exists():
        stated = json.loads(path.read_text()).get("eos_token_id")
        ends.update(stated if isinstance(stated, list) else [stated])
    return frozenset(token for token in ends if token is not None)


class _Recent(OrderedDict[_Key, _Value]):
    """A mapping of the most recently used."""

    def __init__(self, kept: int):
        super().__init__()
        self._kept = kept

    def get(self, key: _Key, make: Callable[[], _Value]) -> _Value:  # type: ignore[override]
        if key in self:
            self.move_to_end(key)
            return self[key]
        value = self[key] = make()
        if len(self) > self._kept:
            self.popitem(last=False)
        return value
