"""Calls of an agent to segments, with real tokenizers and chat templates."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.environment.chat_template import Message
from tasks.environment.openai.agent_text import AgentText
from tasks.environment.openai.conversations import Asked, Call, Conversations
from tasks.environment.rendering import Ids
from tasks.rollout.engines.base import Generation
from tasks.trajectory import NOT_GENERATED, StopReason, Turn
from tests.environment import chat
from tests.environment.openai.templates import WITH_TOOLS, text_of

TOOLS: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}},
)
SCHEMAS = {"add": {"type": "object"}}
TEMPLATES = {
    "chatml": chat.CHATML,
    "tools": WITH_TOOLS,
    "bare": chat.BARE,
    "forgetful": chat.FORGETFUL,
    "thinking": chat.THINKING,
    "qwen3": chat.published("qwen3"),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AgentText]:
    return {name: text_of(tmp_path_factory.mktemp(name), text) for name, text in TEMPLATES.items()}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, calls: list[dict[str, Any]] | None = None) -> Message:
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def asking(*messages: Message, tools: bool = False) -> Asked:
    return Asked(messages, TOOLS, SCHEMAS) if tools else Asked(messages)


def sampled(raw: str, mark: int = 0) -> Generation:
    ids = np.array(chat.ids(raw), np.int32)
    return Generation(
        ids, np.full(len(ids), -1.0 - mark, np.float32), np.full(len(ids), mark, np.int32), StopReason.STOP
    )


def answer(
    conversations: Conversations, call: Call, raw: str, shown: Message | None = None, mark: int = 0
) -> Message:
    """The engine says `raw`; the agent gets `shown`, or its text."""
    text = raw.removesuffix("<|im_end|>")
    message = shown or assistant(text)
    said = {**message, "content": conversations._text.response_start + message["content"]}
    turn = Turn(0, 0, StopReason.STOP, text)
    conversations.answered(call, sampled(raw, mark), turn, said=said, shown=message)
    return message


def ids(text: str) -> list[int]:
    return chat.ids(text)


def test_a_call_that_goes_on_appends_what_the_template_adds(texts: dict[str, AgentText]) -> None:
    conversations = Conversations(texts["chatml"])
    first = conversations.begin(asking(user("hi")))
    assert first.context.tolist() == ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    said = answer(conversations, first, "yo<|im_end|>")
    second = conversations.begin(asking(user("hi"), said, user("so?")))
    assert second.session == 0
    assert second.context.tolist() == [
        *first.context.tolist(),
        *ids("yo<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"),
    ]
    answer(conversations, second, "ok<|im_end|>")
    (segment,) = conversations.segments
    assert [(turn.response_start, turn.response_end) for turn in segment.turns] == [
        (len(first.context), len(first.context) + 3),
        (len(second.context), len(second.context) + 3),
    ]
    assert (segment.versions != NOT_GENERATED).sum() == 6


def test_a_response_without_its_end_token_gets_it_from_the_template(texts: dict[str, AgentText]) -> None:
    conversations = Conversations(texts["chatml"])
    said = answer(conversations, conversations.begin(asking(user("hi"))), "cut")
    call = conversations.begin(asking(user("hi"), said, user("x")))
    assert call.session == 0
    assert call.context.tolist() == ids(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\ncut<|im_end|>\n"
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    )
    assert conversations.segments[0].versions[-3:].tolist() == [0, 0, 0]


def test_sampled_ids_are_kept_where_the_text_would_be_tokenised_otherwise(tmp_path: Path) -> None:
    """A tokenizer in which `ab` is one token: the policy sampled `a` and `b`."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    directory = chat.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([AddedToken("ab", normalized=False)])
    tokenizer.save_pretrained(directory)
    from tasks.environment.rendering import ChatRenderer

    text = AgentText(ChatRenderer(directory))
    merged = text.encode("ab").tolist()
    assert len(merged) == 1
    conversations = Conversations(text)
    said = answer(conversations, conversations.begin(asking(user("q"))), "ab<|im_end|>")
    call = conversations.begin(asking(user("q"), said, user("ab")))
    assert (call.session, call.context.tolist().count(merged[0])) == (0, 1)
    context = call.context.tolist()
    start = len(ids("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"))
    assert context[start : start + 3] == ids("ab<|im_end|>")


def test_an_edited_history_another_conversation_and_other_tools_begin_anew(
    texts: dict[str, AgentText],
) -> None:
    conversations = Conversations(texts["tools"])
    said = answer(conversations, conversations.begin(asking(user("hi"))), "yo<|im_end|>")
    edited = conversations.begin(asking(user("hi"), assistant("yo!"), user("x")))
    other = conversations.begin(asking(user("ho")))
    tools = conversations.begin(asking(user("hi"), said, user("x"), tools=True))
    assert [edited.session, other.session, tools.session] == [1, 2, 3]
    assert all(len(conversations.segments[call.session].tokens) == 0 for call in (edited, other, tools))


def test_a_branch_keeps_the_ids_of_the_trunk_and_trains_them_once(texts: dict[str, AgentText]) -> None:
    conversations = Conversations(texts["chatml"])
    said = answer(conversations, conversations.begin(asking(user("hi"))), "yo<|im_end|>", mark=1)
    history = (user("hi"), said)
    main = conversations.begin(asking(*history, user("a")))
    beside = conversations.begin(asking(*history, user("b")))  # while the other is under way
    assert (main.session, beside.session) == (0, 1)
    answer(conversations, beside, "B<|im_end|>", mark=2)
    answer(conversations, main, "A<|im_end|>", mark=3)
    later = conversations.begin(asking(*history, user("c")))  # an old point of a conversation
    assert later.session == 2
    answer(conversations, later, "C<|im_end|>", mark=4)
    stamps = [set(segment.versions.tolist()) - {NOT_GENERATED} for segment in conversations.segments]
    assert stamps == [{1, 3}, {2}, {4}]
    trunk = conversations.segments[0].tokens[: conversations.segments[0].turns[0].response_end].tolist()
    for segment in conversations.segments[1:]:
        assert segment.tokens[: len(trunk)].tolist() == trunk
        assert (segment.logprobs[: len(trunk)] == 0).all()


def test_answers_that_read_alike_are_continued_one_each(texts: dict[str, AgentText]) -> None:
    conversations = Conversations(texts["chatml"])
    calls = [conversations.begin(asking(user("hi"))) for _ in range(2)]
    assert [call.session for call in calls] == [0, 1]
    said = [answer(conversations, call, "yo<|im_end|>") for call in calls]
    later = [conversations.begin(asking(user("hi"), said[0], user("x"))) for _ in range(3)]
    assert sorted(call.session for call in later) == [0, 1, 2]


def test_a_dropped_call_leaves_no_trace(texts: dict[str, AgentText]) -> None:
    conversations = Conversations(texts["chatml"])
    said = answer(conversations, conversations.begin(asking(user("hi"))), "yo<|im_end|>")
    before = conversations.segments[0].tokens.tolist()
    conversations.dropped(conversations.begin(asking(user("hi"), said, user("x"))))
    assert conversations.segments[0].tokens.tolist() == before
    again = conversations.begin(asking(user("hi"), said, user("y")))
    assert (again.segment, again.session) == (0, 0)
    conversations.dropped(again, cut_off=True)
    after = conversations.begin(asking(user("hi"), said, user("z")))
    assert (after.segment, after.session) == (0, 1)


@pytest.mark.parametrize("raw", ['<tool_call>{"name":"add","arguments":{"a":1}}</tool_call><|im_end|>'])
def test_tool_calls_that_the_template_lays_out_otherwise_keep_their_ids(
    texts: dict[str, AgentText], raw: str
) -> None:
    """The sampled layout, without white space, is not the template's."""
    conversations = Conversations(texts["tools"])
    first = conversations.begin(asking(user("1?"), tools=True))
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = answer(conversations, first, raw, assistant("", [call]))
    result = {"role": "tool", "content": "2", "tool_call_id": "c"}
    second = conversations.begin(asking(user("1?"), said, result, tools=True))
    assert second.session == 0
    assert second.context.tolist() == [
        *first.context.tolist(),
        *ids(raw),
        *ids("\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
    ]


def test_arguments_written_anew_by_the_agent_are_the_same_call(texts: dict[str, AgentText]) -> None:
    conversations = Conversations(texts["tools"])
    raw = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'

    def call(arguments: str) -> list[dict[str, Any]]:
        return [{"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}]

    answer(
        conversations,
        conversations.begin(asking(user("1?"), tools=True)),
        raw,
        assistant("", call('{"a": 1}')),
    )
    result = {"role": "tool", "content": "2", "tool_call_id": "c"}
    again = asking(user("1?"), assistant("", call('{"a":1}')), result, tools=True)
    assert conversations.begin(again).session == 0
    other = asking(user("1?"), assistant("", call('{"a":2}')), result, tools=True)
    assert conversations.begin(other).session == 1


def test_errors_of_calls_that_were_not_run_stand_after_the_results_of_those_that_were(
    texts: dict[str, AgentText],
) -> None:
    conversations = Conversations(texts["tools"])
    raw = '<tool_call>{"name": "add"}</tool_call><tool_call>{</tool_call>'
    shown = assistant("", [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}])
    call = conversations.begin(asking(user("1?"), tools=True))
    error = {"role": "tool", "content": "Error: no", "tool_call_id": ""}
    turn = Turn(0, 0, StopReason.STOP, raw)
    conversations.answered(
        call, sampled(raw + "<|im_end|>"), turn, said=assistant(raw), shown=shown, errors=[error]
    )
    result = {"role": "tool", "content": "2", "tool_call_id": "c"}
    after = conversations.begin(asking(user("1?"), shown, result, user("and?"), tools=True))
    assert after.session == 0
    assert after.context.tolist()[len(call.context) :] == ids(
        raw + "<|im_end|>\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nError: no\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_without_tools_gets_them_in_the_plain_format(texts: dict[str, AgentText]) -> None:
    assert texts["chatml"].plain_tools
    assert not texts["tools"].plain_tools
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    messages = [user("1?"), assistant("so", [call]), {"role": "tool", "content": "2", "tool_call_id": "c"}]
    text = texts["chatml"].text(messages, TOOLS, True)
    assert text.startswith("<|im_start|>system\nYou may call tools.")
    assert '{"name": "add", "description": "", "parameters": {"type": "object"}}\n' in text
    assert text.endswith(
        '<|im_start|>assistant\nso\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_without_a_system_message_gets_it_in_the_first_users(tmp_path: Path) -> None:
    refusing = (
        "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    text = text_of(tmp_path, refusing)
    assert text.text([{"role": "system", "content": "S"}, user("U")], (), True) == (
        "<|im_start|>user\nS\n\nU<|im_end|>\n<|im_start|>assistant\n"
    )


def test_thinking_that_the_template_drops_begins_a_segment_and_is_trained_once(
    texts: dict[str, AgentText],
) -> None:
    conversations = Conversations(texts["qwen3"])
    first = conversations.begin(asking(user("hi")))
    said = answer(conversations, first, "<think>\nhm\n</think>\n\nyo<|im_end|>", mark=1)
    second = conversations.begin(asking(user("hi"), said, user("x")))
    assert second.session == 1
    assert second.context.tolist() == ids(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    )
    answer(conversations, second, "ok<|im_end|>", mark=2)
    stamps = [set(segment.versions.tolist()) - {NOT_GENERATED} for segment in conversations.segments]
    assert stamps == [{1}, {2}]


def test_completions_go_on_from_text_and_from_ids(texts: dict[str, AgentText]) -> None:
    conversations = Conversations(texts["chatml"])
    first = conversations.begin_completion("once")
    assert first.context.tolist() == ids("once")
    answer(conversations, first, " upon")
    second = conversations.begin_completion("once upon a")
    assert (second.session, second.context.tolist()) == (0, ids("once upon a"))
    answer(conversations, second, " time<|im_end|>")
    prompt: Ids = np.array([*ids("once upon a time<|im_end|>"), *ids("!")], np.int32)
    third = conversations.begin_completion(prompt)
    assert (third.session, third.context.tolist()) == (0, prompt.tolist())
    assert conversations.begin_completion("once upon a time!").session == 1


steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "answer", "drop"]),
        st.integers(0, 50),
        st.text("ab <>/think\n", max_size=6),
        st.booleans(),
    ),
    max_size=24,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(TEMPLATES)), steps=steps)
def test_whatever_an_agent_asks_every_response_is_trained_once_in_the_context_it_was_sampled_in(
    texts: dict[str, AgentText], name: str, steps: list[tuple[str, int, str, bool]]
) -> None:
    text = texts[name]
    conversations = Conversations(text)
    histories: list[tuple[Message, ...]] = [()]
    open_calls: list[Call] = []
    given_out: list[tuple[Call, Generation]] = []
    for kind, pick, words, ended in steps:
        if kind == "ask":
            history = histories[pick % len(histories)]
            call = conversations.begin(asking(*history, user(words)))
            assert call.session not in {other.session for other in open_calls}
            open_calls.append(call)
            continue
        if not open_calls:
            continue
        call = open_calls.pop(pick % len(open_calls))
        if kind == "drop":
            conversations.dropped(call)
            continue
        mark = len(given_out)
        raw = (words or "a") + ("<|im_end|>" if ended else "")
        shown = answer(conversations, call, raw, mark=mark)
        given_out.append((call, sampled(raw, mark)))
        histories.append((*call.asked.messages, shown))
    trained: list[int] = []
    for segment in conversations.segments:
        assert len(segment.tokens) == len(segment.logprobs) == len(segment.versions)
        stamped = np.zeros(len(segment.tokens), bool)
        for turn in segment.turns:
            mark = int(segment.versions[turn.response_start])
            call, generation = given_out[mark]
            trained.append(mark)
            assert segment.tokens[: turn.response_start].tolist() == call.context.tolist()
            kept = slice(turn.response_start, turn.response_end)
            assert segment.tokens[kept].tolist() == generation.tokens.tolist()
            assert segment.logprobs[kept].tolist() == generation.logprobs.tolist()
            assert segment.versions[kept].tolist() == generation.versions.tolist()
            stamped[kept] = True
        assert (segment.versions[~stamped] == NOT_GENERATED).all()
        assert (segment.logprobs[~stamped] == 0).all()
    assert sorted(trained) == list(range(len(given_out)))
