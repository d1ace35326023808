"""The small policy's own tokenizer: what recurs in its domains' texts is one token, whatever its length.

Compute goes with the number of tokens, and a domain's texts are mostly fixed phrases around a few numbers. So
tokens may span words: a line, or what lies between two digits of a line, can be a single token. Digits are
always tokens of their own, so that numbers are read and written alike everywhere.

Candidates are the merges of byte-level BPE (Sennrich et al. 2016) on one half of the texts. Those that
shorten all of the texts most are kept, without the intermediate merges that BPE itself would need: text is
cut into the fewest tokens that spell it (a unigram model with equal scores, Kudo 2018).
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, USER, ASSISTANT = "<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, USER, ASSISTANT)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ '<|user|>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' -%}{{ '<|assistant|>' + message['content'] + eos_token }}"
    "{%- else -%}{{ raise_exception('this template knows the roles user and assistant only') }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
"""`<|user|>text<|assistant|>text<|eos|><|user|>…`: the ids are a prefix of every longer conversation's."""

_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # one printable character a byte
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + len(_BYTES)
_CANDIDATES = 8  # times the vocabulary
_ACTION_WEIGHT = 8  # a token of a response costs a decode step, one of a prompt only a share of a prefill
_SHRINK = 0.75  # of the candidates, kept in one round: what is dropped changes how the rest is used


def build_tokenizer(
    texts: Sequence[str], actions: Sequence[str], vocabulary: int, max_context: int
) -> PreTrainedTokenizerFast:
    """Learn a tokenizer of at most `vocabulary` tokens from observations and actions.

    `decode(encode(text)) == text` for every text. Encoding adds no special token of its own, and the end
    token differs from the padding token. The same texts in the same order give the same tokenizer. Raises
    ValueError when `vocabulary` cannot hold the special tokens and the 256 bytes.
    """
    if vocabulary < SMALLEST_VOCABULARY:
        raise ValueError(
            f"model.build.vocabulary ({vocabulary}) must be at least {SMALLEST_VOCABULARY}: "
            f"256 bytes and {len(SPECIAL_TOKENS)} special tokens"
        )
    # The other half shows which parts of a phrase are needed where the whole was not seen.
    half = random.Random(0).sample(texts, (len(texts) + 1) // 2)
    candidates = _candidates([*half, *actions], vocabulary * _CANDIDATES)
    phrases = _choose(candidates, texts, actions, vocabulary - SMALLEST_VOCABULARY)
    tokenizer = PreTrainedTokenizerFast(
        # Special tokens stay out of the model, so that text can also be encoded without recognising them.
        tokenizer_object=_shortest([*_BYTES, *phrases]),
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=max_context,
        padding_side="right",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _candidates(texts: Sequence[str], limit: int) -> list[str]:
    bpe = _with_pieces(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=limit, min_frequency=2, initial_alphabet=_BYTES, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return sorted(token for token in bpe.get_vocab() if len(token) > 1)


def _choose(candidates: list[str], texts: Sequence[str], actions: Sequence[str], limit: int) -> list[str]:
    """The `limit` candidates that save most tokens, the best first."""
    while True:
        tokenizer = _shortest([*_BYTES, *candidates])
        uses = _count(tokenizer, texts)
        for token, count in _count(tokenizer, actions).items():
            uses[token] += _ACTION_WEIGHT * count
        saved = {token: uses[token] * (len(token) - 1) for token in candidates if uses[token] > 1}
        ranked = sorted(saved, key=lambda token: (-saved[token], token))
        if len(ranked) <= limit:
            return ranked
        candidates = ranked[: max(limit, int(_SHRINK * len(ranked)))]


def _count(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[str]:
    distinct = Counter(texts)
    uses: Counter[str] = Counter()
    for count, encoding in zip(distinct.values(), tokenizer.encode_batch(list(distinct)), strict=True):
        for token in encoding.tokens:
            uses[token] += count
    return uses


def _shortest(vocabulary: Sequence[str]) -> Tokenizer:
    """A tokenizer that cuts text into the fewest of these tokens."""
    return _with_pieces(models.Unigram([(token, -1.0) for token in vocabulary]))


def _with_pieces(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[0-9]"), "isolated"),
            pre_tokenizers.Split("\n", "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
