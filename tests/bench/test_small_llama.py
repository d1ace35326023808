from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.bench.small_llama import build, build_tokenizer


def test_a_seed_writes_the_same_float32_model_of_the_stated_size(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    sizes = [build(tmp_path / name, seed) for name, seed in [("a", 1), ("b", 1), ("c", 2)]]
    assert torch.equal(before, torch.random.get_rng_state())
    layer = 4 * 192 * 192 + 3 * 192 * 512 + 2 * 192
    assert sizes == [100 * 192 + 5 * layer + 192] * 3
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_a_conversation_is_a_prefix_of_every_longer_one(tmp_path: Path) -> None:
    build(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    talk = [
        {"role": "user", "content": " 3+4= "},
        {"role": "assistant", "content": "7 "},
        {"role": "user", "content": "?"},
    ]

    def ids(messages: int, prompt: bool) -> list[int]:
        rendered = tokenizer.apply_chat_template(
            talk[:messages], add_generation_prompt=prompt, tokenize=True, return_dict=False
        )
        return cast(list[int], rendered)

    whole = ids(3, True)
    for messages, prompt in [(1, False), (1, True), (2, False), (3, False)]:
        part = ids(messages, prompt)
        assert whole[: len(part)] == part
    assert tokenizer.convert_ids_to_tokens(whole) == [
        *["<|user|>", " ", "3", "+", "4", "=", " ", "<|assistant|>", "7", " ", "<|eos|>"],
        *["<|user|>", "?", "<|assistant|>"],
    ]


def test_text_comes_back_as_it_went_in_and_other_characters_are_refused() -> None:
    tokenizer = build_tokenizer()
    text = "".join(chr(code) for code in range(32, 127))
    assert len(tokenizer(text)["input_ids"]) == len(text)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode([0, 3, 4, *tokenizer("a b")["input_ids"], 2], skip_special_tokens=True) == "a b"
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
    with pytest.raises(Exception, match="UNK"):
        tokenizer("é")
