"""Agents that run elsewhere: they take episodes over HTTP and hand in results."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tasks.environment.openai.config import AgentOptions
from tasks.environment.openai.gateway import GatewayError
from tasks.environment.openai.offers import Offers
from tasks.environment.openai.serving import external_token
from tasks.environment.sources.base import StepResult
from tasks.trajectory import InfraError, Reward, StopReason
from tests.environment.openai.engine_proxy import working
from tests.environment.openai.test_agent_episodes import BUDGETS, member, play

TOKEN = {"Authorization": "Bearer give-me-work"}


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


async def foreign(root: str, result: dict[str, Any]) -> dict[str, Any]:
    """What a process elsewhere does: take an episode, ask once, hand in `result`. Returns its task."""
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{root}/tutti/v1/episodes", headers=TOKEN, json={"wait_s": 60}) as response:
            assert response.status == 200
            episode: dict[str, Any] = await response.json()
        key = episode["api_key"]
        async with openai.AsyncOpenAI(base_url=episode["base_url"], api_key=key) as client:
            await client.completions.create(model=episode["model"], prompt="Once", max_tokens=4)
        headers = {"Authorization": f"Bearer {key}"}
        for expected in (200, 410):  # a result counts once
            async with session.post(f"{root}/tutti/v1/result", headers=headers, json=result) as response:
                assert response.status == expected
    return episode


@pytest.mark.slow
async def test_an_agent_elsewhere_takes_episodes_and_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUTTI_AGENT_TOKEN", "give-me-work")
    port = free_port()
    options = {"external": True, "timeout_s": 60}
    domains = {
        "far": {"source": "agent", "options": options, **BUDGETS},
        "late": {"source": "agent", "options": {**options, "timeout_s": 0.2}, **BUDGETS},
    }
    async with (
        working(tmp_path, domains, gateway_port=port) as (_, worker),
        aiohttp.ClientSession() as session,
    ):
        root = f"http://127.0.0.1:{port}"
        playing = asyncio.create_task(play(worker, member("far", 0), member("far", 1)))
        good = await foreign(root, {"reward": 0.75, "info": {"by": "hand"}})
        bad = await foreign(root, {"error": "the page was down"})
        headers = await playing
        late = asyncio.create_task(play(worker, member("late", 2)))
        body = {"domain": "late", "wait_s": 60}
        async with session.post(f"{root}/tutti/v1/episodes", headers=TOKEN, json=body) as response:
            assert (await response.json())["domain"] == "late"
        (timed_out,) = await late
        for headers_sent, status in ((TOKEN, 204), ({}, 401), ({"Authorization": "Bearer x"}, 401)):
            async with session.post(
                f"{root}/tutti/v1/episodes", headers=headers_sent, json={"wait_s": 0.1}
            ) as response:
                assert response.status == status
    assert good["task"] == bad["task"] == {"seed": 7, "row": None}
    found = {type(header.outcome): header for header in headers}
    assert found[Reward].outcome == Reward(0.75)
    assert found[InfraError].stop is StopReason.ENVIRONMENT_ERROR
    assert "the page was down" in found[InfraError].error
    assert timed_out.stop is StopReason.ENVIRONMENT_TIMEOUT
    assert "domains.late.options.timeout_s" in timed_out.error


async def test_the_oldest_offer_that_a_taker_wants_is_taken_and_ended_offers_are_gone() -> None:
    offers = Offers()

    def offered(domain: str, key: str) -> "asyncio.Task[StepResult]":
        return asyncio.create_task(offers.offer(domain, "{}", {"api_key": key}, 60))

    first, second, third = offered("a", "1"), offered("b", "2"), offered("b", "3")
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    taken = await offers.take("b", 5)
    assert taken is not None
    assert taken.access == {"api_key": "3"}
    assert not offers.end("1", "not taken yet")
    other = await offers.take(None, 5)
    assert other is not None
    assert other.domain == "a"
    assert await offers.take(None, 0.01) is None
    result = StepResult("", 1.0, True)
    assert offers.end("1", result)
    assert not offers.end("1", result)
    assert await first is result
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    assert not offers.end("3", result)


def test_agents_elsewhere_need_a_token_and_a_port_that_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    external = [AgentOptions(external=True)]
    monkeypatch.delenv("TUTTI_AGENT_TOKEN", raising=False)
    assert external_token([AgentOptions(command=("x",))], 0) is None
    with pytest.raises(GatewayError, match="TUTTI_AGENT_TOKEN"):
        external_token(external, 80)
    monkeypatch.setenv("TUTTI_AGENT_TOKEN", "t")
    with pytest.raises(GatewayError, match=r"environment\.gateway_port"):
        external_token(external, 0)
    assert external_token(external, 80) == "t"
