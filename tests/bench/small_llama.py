"""The policy of the throughput benchmark: a small Llama and a character-level tokenizer, in one directory.

It needs torch, transformers and tokenizers only, so that it runs in Tutti's environment and in TRL's, and
both systems load the same files.

    python tests/bench/small_llama.py DIRECTORY [SEED]
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS, USER, ASSISTANT = "<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"
SPECIAL = [PAD, BOS, EOS, USER, ASSISTANT]
CHARACTERS = [chr(code) for code in range(32, 127)]  # printable ASCII

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ '<|user|>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' -%}{{ '<|assistant|>' + message['content'] + eos_token }}"
    "{%- else -%}{{ raise_exception('the template knows the roles user and assistant only') }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
"""`<|user|>text<|assistant|>text<|eos|><|user|>…`: the ids of a conversation begin every longer one."""


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    context: int


SMALL = Shape(192, 512, 5, 6, 512)
"""Exactly 2 233 152 parameters: 100 x 192 tied embeddings, five layers of 442 752 and a final norm of 192."""
TINY = Shape(32, 64, 1, 2, 2048)
"""As little as a trainer can train, for benchmarks of everything else."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of printable ASCII, and five special tokens; encoding any other character raises.

    Encoding adds no special token of its own. The end token differs from the padding token.
    """
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        padding_side="left",
    )


def build(directory: str | Path, seed: int = 0, shape: Shape = SMALL) -> int:
    """Write model and tokenizer in Hugging Face format, in float32; returns the number of parameters.

    The same seed writes the same weights. The caller's random state is left as it was.
    """
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return int(model.num_parameters())


if __name__ == "__main__":
    print(build(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0))
