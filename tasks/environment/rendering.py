"""Messages to token ids through a chat template, without ever re-tokenising what the policy sampled.

The template is asked for the whole text of a fixed short conversation with and without the next observation;
what it adds is appended to the ids that are there. This is only right when the template is *prefix
preserving*: adding a message must not change the text before it. That is tested when the template is loaded.
"""

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

Ids = NDArray[np.int32]
_Value = TypeVar("_Value")
_USER = {"role": "user", "content": "A"}
_ASSISTANT = {"role": "assistant", "content": "B"}


class TemplateError(ValueError):
    """The tokenizer's chat template cannot serve multi-turn episodes; the message names `model.path`."""


class ChatRenderer:
    """Prompts and observations as ids, and responses as text, for one tokenizer. Use it from one thread.

    Of each kind the `kept` most recently used results are remembered. Returned arrays are shared: do not
    write to them.
    """

    def __init__(self, directory: str | Path, *, multi_turn: bool = True, kept: int = 4096):
        """Load the tokenizer of a directory in Hugging Face format.

        With `multi_turn`, raises `TemplateError` where observations cannot be appended; without it, only
        `initial` and `decode` may be called and any template will do.
        """
        self._directory = directory
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._encoder = self._tokenizer.backend_tokenizer
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self.end_tokens = _end_tokens(Path(directory), self._tokenizer)
        self._prompts: _Recent[str, Ids] = _Recent(kept)
        self._observations: _Recent[tuple[str, bool], Ids] = _Recent(kept)
        self._texts: _Recent[bytes, str] = _Recent(kept)
        self._base = self._text([_USER, _ASSISTANT])
        if multi_turn:
            self._end, self._after_end = self._find_end()

    def initial(self, prompt: str) -> Ids:
        """The first context: the prompt as the user's message, and what asks the policy to answer."""
        return self._prompts.get(prompt, lambda: self._encode(self._text([_message(prompt)], ask=True)))

    def observation(self, text: str, ended: bool) -> Ids:
        """What follows a response: its end, the observation as the user's message, and the next asking.

        `ended` says that the policy sampled the end token itself; otherwise it is the first of these ids.
        Raises `TemplateError` when the template does not keep the prefix for this text.
        """
        return self._observations.get((text, ended), lambda: self._observation(text, ended))

    def decode(self, response: Ids) -> str:
        """The response as text, without special tokens."""
        return self._texts.get(
            response.tobytes(),
            lambda: self._tokenizer.decode(
                response.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
        )

    def _observation(self, text: str, ended: bool) -> Ids:
        added = self._added(self._base, [_USER, _ASSISTANT, _message(text)])
        end = [] if ended else [self._end]
        return np.array([*end, *self._after_end, *self._encode(added)], np.int32)

    def _added(self, base: str, messages: list[dict[str, str]]) -> str:
        whole = self._text(messages, ask=True)
        if not whole.startswith(base):
            raise self._not_preserving("a further message changes the text before it")
        return whole[len(base) :]

    def _find_end(self) -> tuple[int, list[int]]:
        """The template's end token of a response, and the ids between it and the next message.

        Also tests on ids that the template keeps its prefix, in the first turn and in a later one.
        """
        asked = self._encode(self._text([_USER], ask=True))
        base = self._encode(self._base)
        if base[: len(asked)].tolist() != asked.tolist():
            raise self._not_preserving("what asks for a response is not what stands before one in history")
        response = base[len(asked) :].tolist()
        ends = [index for index, token in enumerate(response) if token in self.end_tokens]
        if not ends:
            raise TemplateError(
                f"model.path {self._directory}: the chat template ends a response with none of the end "
                f"tokens {sorted(self.end_tokens)} of tokenizer and generation_config.json"
            )
        second = self._added(self._base, [_USER, _ASSISTANT, _USER])
        longer = self._text([_USER, _ASSISTANT, _USER, _ASSISTANT])
        third = self._added(longer, [_USER, _ASSISTANT, _USER, _ASSISTANT, _USER])
        whole = self._encode(self._base + second).tolist()
        if third != second or whole != [*base.tolist(), *self._encode(second).tolist()]:
            raise self._not_preserving("the ids of a message depend on the messages before it")
        return response[ends[-1]], response[ends[-1] + 1 :]

    def _not_preserving(self, what: str) -> TemplateError:
        return TemplateError(
            f"model.path {self._directory}: its chat template is not prefix preserving ({what}), so a "
            "multi-turn episode has no one token sequence: give the tokenizer another chat_template"
        )

    def _text(self, messages: list[dict[str, str]], ask: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        return text

    def _encode(self, text: str) -> Ids:
        return np.array(self._encoder.encode(text, add_special_tokens=False).ids, np.int32)


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _end_tokens(directory: Path, tokenizer: Any) -> frozenset[int]:
    ends = {tokenizer.eos_token_id}
    path = directory / "generation_config.json"
    if path.exists():
        stated = json.loads(path.read_text()).get("eos_token_id")
        ends.update(stated if isinstance(stated, list) else [stated])
    return frozenset(token for token in ends if token is not None)


_Key = TypeVar("_Key")


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
