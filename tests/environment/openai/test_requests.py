from typing import Any

import pytest

from tasks.environment.openai.requests import Refused, chat_request, completion_request

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def test_messages_are_brought_into_one_form() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    body = {
        "model": "m",
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
            {"role": "tool", "tool_call_id": "c1", "content": "r"},
        ],
    }
    assert chat_request(body).asked.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "c1"},
    )


def test_options_that_would_change_the_distribution_are_ignored_and_named() -> None:
    body = {**HELLO, "temperature": 0.1, "top_p": 0.9, "seed": 3, "presence_penalty": 0, "top_k": None}
    assert chat_request(body).sampling.ignored == ("temperature", "top_p", "seed")
    assert chat_request({**HELLO, "top_p": 1.0}).sampling.ignored == ()


def test_the_newer_limit_holds_over_the_older() -> None:
    assert chat_request({**HELLO, "max_tokens": 9, "max_completion_tokens": 4}).sampling.max_tokens == 4
    assert chat_request({**HELLO, "max_tokens": 9}).sampling.max_tokens == 9


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls"),
        ({"n": 2}, "n"),
        ({"stop": [1]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stream_options": 3}, "stream_options"),
        ({"functions": [{}]}, "functions"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]},
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_an_agent_would_rely_on_and_cannot_get_is_refused(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as refused:
        chat_request({**HELLO, **changes})
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.body()["error"]["message"].startswith(param)


def test_prompts_are_one_text_or_one_list_of_ids() -> None:
    assert completion_request({"prompt": ["once"]}).prompt == "once"
    ids = completion_request({"prompt": [[3, 4]]}).prompt
    assert not isinstance(ids, str)
    assert ids.tolist() == [3, 4]
    for prompt in (None, "", [], ["a", "b"], [-1], [1.5], 7):
        with pytest.raises(Refused, match="prompt must be one text"):
            completion_request({"prompt": prompt})
    for name in ("best_of", "logprobs", "suffix"):
        with pytest.raises(Refused, match=name):
            completion_request({"prompt": "x", name: 2})


def test_a_body_must_be_an_object() -> None:
    with pytest.raises(Refused, match="JSON object"):
        chat_request([1])
