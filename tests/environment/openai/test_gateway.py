"""The endpoint as the real `openai` client sees it, before an engine that says what a test has written."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from infra.rpc import RpcError
from tasks.environment.config import DomainConfig
from tasks.environment.openai.agent_text import AgentText
from tasks.environment.openai.gateway import AgentGateway, GatewayError
from tasks.environment.openai.run import AgentRun
from tasks.environment.rendering import Ids
from tasks.rollout.engines.base import Generation
from tasks.trajectory import NOT_GENERATED, StopReason
from tests.environment import chat
from tests.environment.openai.templates import WITH_TOOLS, text_of

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
        },
    },
}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> AgentText:
    return text_of(tmp_path_factory.mktemp("tools"), WITH_TOOLS)


@dataclass
class Served:
    """An open episode: a client of it, and what its engine was asked."""

    client: openai.AsyncOpenAI
    run: AgentRun
    gateway: AgentGateway
    began: asyncio.Event
    asked: list[tuple[int, list[int], int, int]]


Says = list[Any] | Callable[[int], Any]
"""Responses in the order of calls: a text, an error, or seconds to wait before the text `late`."""


@asynccontextmanager
async def serving(text: AgentText, says: Says, **budgets: Any) -> AsyncIterator[Served]:
    asked: list[tuple[int, list[int], int, int]] = []
    began = asyncio.Event()

    async def generate(session: int, context: Ids, at_most: int, turn: int) -> Generation:
        began.set()
        asked.append((session, context.tolist(), at_most, turn))
        said = says(turn) if callable(says) else says[turn]
        if isinstance(said, Exception):
            raise said
        if isinstance(said, float):
            await asyncio.sleep(said)
            said = "late"
        raw = said if said.endswith("~") else said + "<|im_end|>"
        found = np.array(chat.ids(raw.rstrip("~")), np.int32)[:at_most]
        stop = StopReason.STOP if found[-1] == 2 else StopReason.LENGTH
        logprobs = -0.5 - np.arange(len(found), dtype=np.float32)
        return Generation(found, logprobs, np.full(len(found), turn, np.int32), stop)

    limits = {"max_turns": 8, "max_turn_tokens": 200, "max_tokens": 4000, **budgets}
    run = AgentRun(DomainConfig(source="x:Y", **limits), generate, text, None, 2)
    gateway = await AgentGateway.start("127.0.0.1")
    with gateway.serving(run) as access:
        async with openai.AsyncOpenAI(base_url=access["base_url"], api_key=access["api_key"]) as client:
            yield Served(client, run, gateway, began, asked)
    await gateway.close()


async def ask(served: Served, *messages: Any, **options: Any) -> Any:
    return await served.client.chat.completions.create(
        model="policy", messages=list(messages) or [USER], **options
    )


def tagged(call: str) -> str:
    return f"<tool_call>{call}</tool_call>"


async def test_an_answer_is_the_response_with_its_counts_and_logprobs(text: AgentText) -> None:
    async with serving(text, ["yo"]) as served:
        answer = await ask(served, logprobs=True, temperature=0.1, max_tokens=9)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "yo", "stop")
    assert choice.message.tool_calls is None
    prompt = chat.ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert served.asked == [(0, prompt, 9, 0)]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 3)
    assert [(each.token, each.logprob) for each in choice.logprobs.content] == [
        ("y", -0.5),
        ("o", -1.5),
        ("<|im_end|>", -2.5),
    ]
    assert answer.tutti == {"ignored": ["temperature"]}
    assert served.run.ignored == {"temperature": 1}


async def test_a_stream_adds_up_to_the_answer(text: AgentText) -> None:
    call = '{"name": "add", "arguments": {"a": 123456789012345678901234567890123456789012345}}'
    async with serving(text, ["so " + tagged(call), "x" * 100 + "~"], max_turn_tokens=150) as served:
        stream = await ask(served, tools=[ADD], stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        plain = [chunk async for chunk in await ask(served, {"role": "user", "content": "b"}, stream=True)]
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "so"
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert (calls[0].function.name, calls[0].index) == ("add", 0)
    assert calls[0].id.startswith("call_")
    arguments = json.loads("".join(call.function.arguments or "" for call in calls))
    assert arguments == {"a": 123456789012345678901234567890123456789012345}
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens == len(chat.ids("so " + tagged(call))) + 1
    assert "".join(chunk.choices[0].delta.content or "" for chunk in plain) == "x" * 100
    assert plain[-1].choices[0].finish_reason == "length"


async def test_the_clients_own_stream_helper_accepts_the_stream(text: AgentText) -> None:
    async with (
        serving(text, [tagged('{"name": "add", "arguments": {"a": 1}}')]) as served,
        served.client.chat.completions.stream(
            model="policy", messages=[{"role": "user", "content": "hi"}], tools=[ADD]
        ) as stream,
    ):
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')


async def test_tool_calls_and_their_results_stay_in_one_sequence(text: AgentText) -> None:
    said = tagged('{"name":"add","arguments":{"a":1}}')
    async with serving(text, [said, "2"]) as served:
        first = (await ask(served, tools=[ADD])).choices[0]
        assert first.finish_reason == "tool_calls"
        (call,) = first.message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        second = await ask(served, USER, first.message.model_dump(), result, tools=[ADD])
        assert second.choices[0].message.content == "2"
    assert [session for session, *_ in served.asked] == [0, 0]
    context = served.asked[0][1] + chat.ids(said + "<|im_end|>")
    assert served.asked[1][1][: len(context)] == context


async def test_malformed_calls_go_back_to_the_policy_and_the_agent_sees_the_repaired_one(
    text: AgentText,
) -> None:
    good = tagged('{"name": "add", "arguments": {"a": 1}}')
    says = [tagged('{"name": "add", "arguments": {}}'), tagged('{"name": "add"'), good, "done"]
    async with serving(text, says) as served:
        answer = (await ask(served, tools=[ADD])).choices[0]
        (call,) = answer.message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        final = await ask(served, USER, answer.message.model_dump(exclude_none=True), result, tools=[ADD])
        assert final.choices[0].message.content == "done"
    contexts = ["".join(_character(token) for token in context) for _, context, *_ in served.asked]
    assert "Error: the arguments of 'add' do not fit: 'a' is a required property" in contexts[1]
    assert "Error: the tool call is not JSON" in contexts[2]
    assert contexts[3].startswith(contexts[2])
    (segment,) = served.run.conversations.segments
    assert len(segment.turns) == 4
    assert [int(segment.versions[turn.response_start]) for turn in segment.turns] == [0, 1, 2, 3]


async def test_a_policy_that_never_gets_a_call_right_answers_with_text(text: AgentText) -> None:
    async with serving(text, [tagged("{")] * 5) as served:
        answer = (await ask(served, tools=[ADD])).choices[0]
    assert (answer.message.content, answer.message.tool_calls) == (tagged("{"), None)
    assert answer.finish_reason == "stop"
    assert len(served.asked) == 3


async def test_of_several_calls_the_good_ones_run_and_the_error_comes_with_their_results(
    text: AgentText,
) -> None:
    said = tagged('{"name": "add", "arguments": {"a": 1}}') + tagged('{"name": "sub"}')
    async with serving(text, [said, "ok"]) as served:
        answer = (await ask(served, tools=[ADD])).choices[0].message
        (call,) = answer.tool_calls
        await ask(
            served,
            USER,
            answer.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "2"},
            tools=[ADD],
        )
    assert len(served.asked) == 2
    after = "".join(map(_character, served.asked[1][1][len(served.asked[0][1]) :]))
    assert after.index("\n2\n") < after.index("Error: there is no tool 'sub'")


async def test_a_stop_text_ends_the_answer_before_it_and_the_trained_tokens_with_it(text: AgentText) -> None:
    async with serving(text, ["abc. def", "more"]) as served:
        answer = (await ask(served, stop=["."])).choices[0]
        assert (answer.message.content, answer.finish_reason) == ("abc", "stop")
        await ask(served, USER, answer.message.model_dump(), {"role": "user", "content": "x"})
    segment = served.run.conversations.segments[0]
    turn = segment.turns[0]
    assert segment.tokens[turn.response_start : turn.response_end].tolist() == chat.ids("abc.")
    assert [session for session, *_ in served.asked] == [0, 0]


async def test_completions_are_served_whole_and_in_streams(text: AgentText) -> None:
    async with serving(text, [" upon~", " a time"]) as served:
        create = served.client.completions.create
        answer = await create(model="policy", prompt="once", max_tokens=5, logprobs=0)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" upon", "length")
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4]
        stream = await create(model="policy", prompt="once upon", stream=True, echo=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "once upon a time"
    assert [session for session, *_ in served.asked] == [0, 0]


async def test_parallel_calls_are_sessions_of_their_own(text: AgentText) -> None:
    async with serving(text, lambda turn: 0.1) as served:
        await asyncio.gather(*(ask(served, {"role": "user", "content": f"q{i}"}) for i in range(4)))
    assert sorted(session for session, *_ in served.asked) == [0, 1, 2, 3]
    assert sorted(turn for *_, turn in served.asked) == [0, 1, 2, 3]


async def test_budgets_are_refused_once_and_said(text: AgentText) -> None:
    async with serving(text, ["a", "b"], max_turns=1) as served:
        await ask(served)
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(served)
        assert refused.value.code == "turns_exhausted"
        assert served.run.refused_for is StopReason.MAX_TURNS
    assert len(served.asked) == 1
    async with serving(text, ["a"], max_tokens=60, max_turn_tokens=59) as served:
        with pytest.raises(openai.BadRequestError) as too_long:
            await ask(served, {"role": "user", "content": "x" * 60})
        assert too_long.value.code == "context_length_exceeded"
        assert served.run.refused_for is StopReason.MAX_TOKENS
        await ask(served, {"role": "user", "content": "x"}, max_tokens=500)
    assert [at_most for _, _, at_most, _ in served.asked] == [60 - len(served.asked[0][1])]


async def test_a_dead_key_is_gone_and_an_unknown_one_unauthorized(text: AgentText) -> None:
    async with serving(text, ["a"]) as served:
        unknown = openai.AsyncOpenAI(base_url=served.gateway.base_url, api_key="sk-other")
        with pytest.raises(openai.AuthenticationError):
            await unknown.models.list()
        assert [model.id async for model in served.client.models.list()] == ["policy"]
        with served.gateway.serving(served.run) as access:
            ended = openai.AsyncOpenAI(base_url=access["base_url"], api_key=access["api_key"])
        with pytest.raises(openai.APIStatusError) as gone:
            await ended.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
        assert (gone.value.status_code, gone.value.code) == (410, "episode_over")
        for client in (unknown, ended):
            await client.close()
    assert served.asked == []


@pytest.mark.parametrize(
    ("error", "stop", "status"),
    [
        (RpcError("stale", "old"), StopReason.STALE, 410),
        (RpcError("cancelled", "redundant"), StopReason.CANCELLED, 410),
        (RpcError("generation_failed", "no worker"), StopReason.GENERATION_ERROR, 503),
        (TimeoutError(), StopReason.GENERATION_ERROR, 503),
    ],
)
async def test_an_episode_that_the_inference_side_ends_is_over_and_not_tried_again(
    text: AgentText, error: Exception, stop: StopReason, status: int
) -> None:
    async with serving(text, ["a", error, "never"]) as served:
        await ask(served)
        for _ in range(2):
            with pytest.raises(openai.APIStatusError) as refused:
                await ask(served, {"role": "user", "content": "x"})
            assert refused.value.status_code == status
        assert served.run.over.is_set()
        assert served.run.stop is stop
    assert len(served.asked) == 2


async def test_a_context_the_engine_refuses_is_the_agents_to_shorten(text: AgentText) -> None:
    async with serving(text, [RpcError("context_overflow", "too long"), "a"]) as served:
        with pytest.raises(openai.BadRequestError):
            await ask(served)
        assert (await ask(served)).choices[0].message.content == "a"
        assert served.run.refused_for is StopReason.CONTEXT_OVERFLOW


async def test_an_answer_nobody_waited_for_is_not_trained(text: AgentText) -> None:
    async with serving(text, [60.0, "b"]) as served:
        call = asyncio.ensure_future(ask(served))
        await served.began.wait()
        call.cancel()  # which closes the connection
        await asyncio.gather(call, return_exceptions=True)
        for _ in range(200):
            if not served.run.conversations.segments[0].busy:
                break
            await asyncio.sleep(0.05)
        assert not any(segment.sampled for segment in served.run.conversations.segments)
        await ask(served)
    sampled = [segment for segment in served.run.conversations.segments if segment.sampled]
    assert [session for session, *_ in served.asked] == [0, 2]  # the first may still be busy
    assert [set(segment.versions.tolist()) for segment in sampled] == [{NOT_GENERATED, 1}]


async def test_a_call_under_way_when_its_episode_ends_is_told_so(text: AgentText) -> None:
    async with serving(text, [30.0]) as served:
        with served.gateway.serving(served.run) as access:
            client = openai.AsyncOpenAI(base_url=access["base_url"], api_key=access["api_key"])
            call = asyncio.ensure_future(
                client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
            )
            await served.began.wait()
        with pytest.raises(openai.APIStatusError) as gone:
            await call
        assert gone.value.status_code == 410
        await client.close()


async def test_what_is_not_served_and_what_is_no_json_have_openais_form(text: AgentText) -> None:
    async with serving(text, []) as served, aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {served.client.api_key}"}
        root = served.gateway.base_url
        for method, url, body, status in (
            ("POST", f"{root}/embeddings", b"{}", 404),
            ("GET", f"{root}/chat/completions", b"", 404),
            ("POST", f"{root}/chat/completions", b"{", 400),
            ("POST", f"{root}/chat/completions", b"[" * 100_000, 400),
        ):
            async with session.request(method, url, data=body, headers=headers) as response:
                assert response.status == status
                assert response.headers["x-should-retry"] == "false"
                assert (await response.json())["error"]["message"]


async def test_a_conversation_on_templates_that_forget_is_broken_into_segments(tmp_path: Path) -> None:
    async with serving(text_of(tmp_path, chat.FORGETFUL), ["one", "two", "three"]) as served:
        messages: list[Any] = [USER]
        for _ in range(3):
            answer = await ask(served, *messages)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "x"}]
    segments = served.run.conversations.segments
    assert [len(segment.turns) for segment in segments] == [1, 1, 1]


def _character(token: int) -> str:
    return "" if token < 3 else "\n" if token == 3 else chr(token + 28)


async def test_an_address_of_another_machine_names_the_option() -> None:
    with pytest.raises(GatewayError, match="set environment"):
        await AgentGateway.start("192.0.2.1")
