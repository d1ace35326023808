"""Small real tokenizers with chat templates, saved in Hugging Face format."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's layout: a newline follows the end token."""

BARE = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)

FORGETFUL = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' and not loop.last %}<|im_start|>...<|im_end|>\n"
    "{% else %}<|im_start|>{{ message['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
"""Shortens earlier responses, as templates of reasoning models do."""

THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
"""Asks with text that does not stand before a response in history."""

ENDLESS = CHATML.replace("<|im_end|>", "<|im_start|>")
"""Never writes the end token."""

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
TEMPLATES = Path(__file__).parent / "templates"
"""Templates of public models without their branches for tools: what they make of a conversation is theirs."""


def published(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def save(directory: Path, template: str = CHATML, max_context: int = 4096, end: str = "<|im_end|>") -> Path:
    """A character-level tokenizer: three special tokens, newline and printable ASCII. `end` is the text of
    the end token, which is the third."""
    letters = ["\n", *map(chr, range(32, 127))]
    special = [*SPECIAL[:2], end]
    vocabulary = {token: index for index, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token=end,
        bos_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    ).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": max_context}))
    return directory


def ids(text: str, end: str = "<|im_end|>") -> list[int]:
    """By hand: special tokens are written as they are, every other character is a token."""
    out = []
    specials = [*SPECIAL[:2], end]
    while text:
        special = next((token for token in specials if text.startswith(token)), None)
        out.append(
            specials.index(special)
            if special
            else len(SPECIAL) + (0 if text[0] == "\n" else ord(text[0]) - 31)
        )
        text = text[len(special or "x") :]
    return out
