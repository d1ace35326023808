import json

import pytest

from tasks.environment.openai.tool_calls import (
    MalformedCall,
    Response,
    ToolCall,
    check_schema,
    error_message,
    first_only,
    take_apart,
)

TOOLS = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
    "now": {"type": "object", "properties": {}},
}
GOOD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.parametrize(
    "text",
    [
        tagged(GOOD),
        f"<tool_call>{GOOD}</tool_call>",
        f"<tool_call>{GOOD}",
        GOOD,
        '{"name": "add", "parameters": {"a": 1, "b": 2}}',
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>',
        "[add(a=1, b=2)]",
    ],
)
def test_every_layout_of_a_call_is_read(text: str) -> None:
    assert take_apart(text, TOOLS) == Response("", (ToolCall("add", {"a": 1, "b": 2}),))


def test_several_calls_amid_text_are_read_in_order() -> None:
    found = take_apart("Let me see.\n" + tagged(GOOD, '{"name": "now"}') + "\n", TOOLS)
    assert found == Response("Let me see.", (ToolCall("add", {"a": 1, "b": 2}), ToolCall("now", {})))
    both = take_apart('{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', TOOLS)
    assert both.calls == (ToolCall("now", {}),) * 2
    assert take_apart("[now(), add(a=-1, b=2)]", TOOLS).calls[1] == ToolCall("add", {"a": -1, "b": 2})


@pytest.mark.parametrize(
    "text", ['{"answer": 3}', "[1, 2]", "[f(x=1)]", '{"name": "else"}', "[add(a=1)", "", "add(a=1, b=2)", "{"]
)
def test_what_names_no_offered_tool_and_has_no_mark_is_text(text: str) -> None:
    assert take_apart(text, TOOLS) == Response(text)


def test_without_tools_all_is_text() -> None:
    assert take_apart(tagged(GOOD), {}) == Response(tagged(GOOD))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ('{"arguments": {}}', "has no name"),
        ('{"name": 3, "arguments": {}}', "has no name"),
        (GOOD + "}", "Extra data"),
        ('{"name": "add", "arguments": }', "Expecting value"),
        ("", "Expecting value"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"name": "sub", "arguments": {}}', "there is no tool 'sub'; the tools are add, now"),
        ('{"name": "add", "arguments": [1, 2]}', "not a JSON object"),
        ('{"name": "add", "arguments": "1, 2"}', "not a JSON object"),
        ('{"name": "add", "arguments": {"a": 1}}', "'b' is a required property"),
        ('{"name": "add", "arguments": {"a": "1", "b": 2}}', ".a of 'add' do not fit: '1' is not of type"),
        ('{"name": "add", "arguments": {"a": NaN, "b": 2}}', "NaN is not JSON"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_the_others_run(call: str, said: str) -> None:
    found = take_apart(tagged(call, GOOD), TOOLS)
    assert found.calls == (ToolCall("add", {"a": 1, "b": 2}),)
    (wrong,) = found.malformed
    assert wrong.text == call
    assert said in wrong.error
    assert wrong.error in error_message(found.malformed)


@pytest.mark.parametrize("text", ["[add(1, 2)]", "[add(a=x, b=2)]", "[add(**{})]", "[add(a={1}, b=2)]"])
def test_python_calls_take_named_literals_only(text: str) -> None:
    found = take_apart(text, TOOLS)
    assert found.calls == ()
    assert "'add' must be" in found.malformed[0].error


def test_where_one_call_is_wanted_the_others_are_reported() -> None:
    found = first_only(take_apart(tagged(GOOD, '{"name": "now"}'), TOOLS))
    assert found.calls == (ToolCall("add", {"a": 1, "b": 2}),)
    text = json.dumps({"name": "now", "arguments": {}})
    assert found.malformed == (MalformedCall(text, "one tool call at a time"),)


def test_schemas_are_checked_and_nothing_outside_them_is_fetched() -> None:
    with pytest.raises(ValueError, match="tool 'x' are not a JSON schema"):
        check_schema("x", {"type": "thing"})
    remote = {"now": {"$ref": "http://127.0.0.1:9/schema.json"}}
    (wrong,) = take_apart(tagged('{"name": "now"}'), remote).malformed
    assert "refers to what is not in it" in wrong.error
