"""Templates of public models: which keep the prefix, and what becomes of it where one does not."""

import numpy as np
import pytest

from tasks.environment.rendering import ChatRenderer, Dialogue, TemplateError
from tests.environment import chat

ENDS = {"llama3": "<|eot_id|>"}
SYSTEM = {
    "qwen2": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "smollm2": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
}


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    made: dict[tuple[str, str], ChatRenderer] = {}

    def renderer(name: str, **options: object) -> ChatRenderer:
        key = (name, repr(options))
        if key not in made:
            directory = chat.save(
                tmp_path_factory.mktemp(name), chat.published(name), end=ENDS.get(name, "<|im_end|>")
            )
            made[key] = ChatRenderer(directory, options=options)
        return made[key]

    return renderer


def response(text: str, end: str = "<|im_end|>") -> np.ndarray:
    return np.array(chat.ids(text, end), np.int32)


def play(renderer: ChatRenderer, dialogue: Dialogue, said: list[tuple[str, str]]) -> list[list[int]]:
    """The contexts of each turn and the last, as an episode builds them."""
    context = renderer.initial(dialogue.prompt, dialogue.system).tolist()
    contexts = [context]
    for text, observation in said:
        sampled = response(text)
        dialogue.responses.append(sampled)
        dialogue.observations.append(observation)
        following = renderer.follow(dialogue)
        before = [] if following.fresh else [*context, *sampled.tolist()]
        context = [*before, *following.ids.tolist()]
        contexts.append(context)
    return contexts


@pytest.mark.parametrize(
    ("name", "keeps"),
    [("qwen2", True), ("smollm2", True), ("llama3", True), ("qwen3", False), ("r1", False)],
)
def test_which_templates_keep_the_prefix(renderers, name, keeps):
    assert renderers(name).keeps_prefix is keeps


@pytest.mark.parametrize("name", ["qwen2", "smollm2"])
def test_the_templates_own_system_prompt_holds_unless_the_domain_has_one(renderers, name):
    asked = "<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n"
    for system, said in ((None, SYSTEM[name]), ("Be brief.", "Be brief.")):
        expected = chat.ids(f"<|im_start|>system\n{said}<|im_end|>\n{asked}")
        assert renderers(name).initial("p", system).tolist() == expected


def test_llama_3_conversations_end_a_turn_by_its_own_token_and_follow_it_at_once(renderers):
    end = ENDS["llama3"]
    renderer = renderers("llama3")

    def header(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    first = f"<|pad|>{header('system')}Be brief.{end}{header('user')}p{end}{header('assistant')}"
    assert renderer.initial("p", "Be brief.").tolist() == chat.ids(first, end)
    for sampled_end in (True, False):
        text = "one" + (end if sampled_end else "")
        dialogue = Dialogue("p", "Be brief.", [response(text, end)], ["q"])
        following = renderer.follow(dialogue)
        expected = ("" if sampled_end else end) + f"{header('user')}q{end}{header('assistant')}"
        assert not following.fresh
        assert following.ids.tolist() == chat.ids(expected, end)


def test_a_system_prompt_that_the_template_refuses_is_an_error_that_names_the_option(renderers):
    with pytest.raises(TemplateError, match=r"domains\.\*\.system_prompt"):
        renderers("r1").initial("p", "Be brief.")


def test_qwen3_keeps_one_sequence_as_long_as_the_policy_does_not_think(renderers):
    contexts = play(renderers("qwen3"), Dialogue("p"), [("one<|im_end|>", "q"), ("two<|im_end|>", "r")])
    whole = chat.ids(
        "<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
        "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    )
    assert contexts[-1] == whole
    assert all(whole[: len(context)] == context for context in contexts)


def test_qwen3_drops_earlier_thinking_so_the_context_begins_anew_without_it(renderers):
    thought = "<think>\nhm\n</think>\n\none<|im_end|>"
    dialogue = Dialogue("p", "S", [response(thought)], ["q"])
    following = renderers("qwen3").follow(dialogue)
    assert following.fresh
    assert following.ids.tolist() == chat.ids(
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    )


def test_qwen3_asked_not_to_think_begins_anew_each_turn_since_history_has_no_empty_thought(renderers):
    renderer = renderers("qwen3", enable_thinking=False)
    contexts = play(renderer, Dialogue("p"), [("one<|im_end|>", "q")])
    asked = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert contexts == [
        chat.ids(f"<|im_start|>user\np<|im_end|>\n{asked}"),
        chat.ids(
            "<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
            f"<|im_start|>user\nq<|im_end|>\n{asked}"
        ),
    ]


@pytest.mark.parametrize("ended", [True, False])
def test_what_asking_wrote_of_the_response_belongs_to_it_in_history(tmp_path, ended):
    """The template opens a thought itself: the thought must not lose its beginning in the next context."""
    renderer = ChatRenderer(chat.save(tmp_path, chat.THINKING))
    said = "hm</think>one" + ("<|im_end|>" if ended else "")
    contexts = play(renderer, Dialogue("p"), [(said, "q")])
    assert contexts[-1] == chat.ids(
        "<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n<think>\nhm</think>one<|im_end|>\n"
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert contexts[-1][: len(contexts[0]) + len(chat.ids(said))] == [*contexts[0], *chat.ids(said)]


def test_r1_asks_with_an_open_thought_and_drops_it_from_history(renderers):
    dialogue = Dialogue("p", None, [response("hm\n</think>one<|im_end|>")], ["q"])
    following = renderers("r1").follow(dialogue)
    assert following.fresh
    expected = "<|User|>p<|Assistant|>one<|im_end|><|User|>q<|Assistant|><think>\n"
    assert following.ids.tolist() == chat.ids(expected)


def test_another_end_token_than_the_templates_is_kept_and_nothing_is_doubled(tmp_path):
    """Several end tokens: the observation begins right after the one that was sampled."""
    directory = chat.save(tmp_path, chat.CHATML)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    dialogue = Dialogue("p", None, [response("one<|pad|>")], ["q"])
    following = ChatRenderer(directory).follow(dialogue)
    assert not following.fresh
    assert following.ids.tolist() == chat.ids("\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")
