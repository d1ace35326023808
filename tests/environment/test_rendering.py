import numpy as np
import pytest

from tasks.environment.rendering import ChatRenderer, TemplateError
from tests.environment import chat


@pytest.fixture(scope="module")
def qwen_like(tmp_path_factory):
    return ChatRenderer(chat.save(tmp_path_factory.mktemp("qwen")))


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return ChatRenderer(chat.save(tmp_path_factory.mktemp("bare"), chat.BARE))


def test_the_first_context_is_the_prompt_and_the_asking(qwen_like):
    expected = chat.ids("<|im_start|>user\nwhere?<|im_end|>\n<|im_start|>assistant\n")
    assert qwen_like.initial("where?").tolist() == expected
    assert qwen_like.initial("where?").dtype == np.int32


def test_after_a_sampled_end_token_comes_what_the_template_puts_behind_it(qwen_like, bare):
    expected = chat.ids("\n<|im_start|>user\nrow 2<|im_end|>\n<|im_start|>assistant\n")
    assert qwen_like.observation("row 2", ended=True).tolist() == expected
    assert bare.observation("row 2", ended=True).tolist() == chat.ids(
        "<|im_start|>row 2<|im_end|><|im_start|>"
    )


def test_a_response_cut_by_length_is_ended_by_an_unsampled_end_token(qwen_like, bare):
    expected = chat.ids("<|im_end|>\n<|im_start|>user\nrow 2<|im_end|>\n<|im_start|>assistant\n")
    assert qwen_like.observation("row 2", ended=False).tolist() == expected
    expected = chat.ids("<|im_end|><|im_start|>row 2<|im_end|><|im_start|>")
    assert bare.observation("row 2", ended=False).tolist() == expected


def test_pieces_put_together_are_the_whole_conversation(qwen_like):
    built = [
        *qwen_like.initial("p"),
        *chat.ids("one<|im_end|>"),
        *qwen_like.observation("q", ended=True),
        *chat.ids("two"),
        *qwen_like.observation("r", ended=False),
    ]
    said = [("user", "p"), ("assistant", "one"), ("user", "q"), ("assistant", "two"), ("user", "r")]
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in said)
    assert built == chat.ids(text + "<|im_start|>assistant\n")


def test_a_response_is_decoded_without_special_tokens(qwen_like):
    assert qwen_like.decode(np.array(chat.ids("go  left .<|im_end|>"), np.int32)) == "go  left ."


def test_a_template_that_never_ends_a_response_is_refused_for_several_turns_by_name(tmp_path):
    directory = chat.save(tmp_path, chat.ENDLESS)
    with pytest.raises(TemplateError, match=r"model\.path"):
        ChatRenderer(directory)
    assert len(ChatRenderer(directory, multi_turn=False).initial("p")) > 0


def test_end_tokens_of_the_generation_configuration_count(tmp_path):
    directory = chat.save(tmp_path, chat.ENDLESS)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    assert ChatRenderer(directory).end_tokens == {1, 2}


def test_only_the_most_recent_are_remembered(tmp_path):
    renderer = ChatRenderer(chat.save(tmp_path), kept=2)
    first = renderer.initial("a")
    renderer.initial("b")
    assert renderer.initial("a") is first
    renderer.initial("c")
    assert renderer.initial("a") is first
    again = renderer.initial("b")
    assert again is renderer.initial("b")
    assert renderer.initial("a") is first
    assert renderer.initial("c") is not None
    assert renderer.initial("b") is not again
