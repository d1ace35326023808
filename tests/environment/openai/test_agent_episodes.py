"""Agents on a real worker, before a real engine."""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from pydantic import ValidationError

from blocks.sample_buffer import SampleBuffer
from infra.object_store import ObjectStore
from tasks.environment.config import DomainConfig
from tasks.environment.episode import turn_seed
from tasks.environment.worker import EnvironmentWorker
from tasks.trajectory import (
    InfraError,
    MemberSpec,
    Reward,
    Skip,
    StopReason,
    Trajectory,
    TrajectoryHeader,
    TrajectoryKey,
)
from tasks.trajectory_arrow import from_arrow
from tests.environment.openai.engine_proxy import working

pytestmark = pytest.mark.slow

BUDGETS = {"max_turns": 12, "max_turn_tokens": 12, "max_tokens": 700}
SCRIPT = str(Path(__file__).with_name("agent_script.py"))


def command(what: str, **options: Any) -> dict[str, Any]:
    return {
        "source": "agent",
        "options": {"command": [sys.executable, SCRIPT, what], "timeout_s": 60, **options},
        **BUDGETS,
    }


def function(name: str, **options: Any) -> dict[str, Any]:
    target = f"tests.environment.openai.agents:{name}"
    return {"source": "agent", "options": {"function": target, "timeout_s": 60, **options}, **BUDGETS}


def member(domain: str, number: int = 0) -> MemberSpec:
    return MemberSpec(TrajectoryKey(1, number), domain, 7, 100 + number, 0, 1.0)


async def play(worker: EnvironmentWorker, *members: MemberSpec) -> list[TrajectoryHeader]:
    return [
        TrajectoryHeader.from_json(header) for header in await worker.run(list(members), lambda header: None)
    ]


def stored(directory: Path, header: TrajectoryHeader) -> Trajectory:
    buffer = SampleBuffer(ObjectStore(str(directory / "samples")))
    (data,) = buffer.get_many([(str(header.name), header.initiating_version)])
    return from_arrow(data)


def running(*words: str) -> list[psutil.Process]:
    """Descendants of this process whose command line has these words."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            line = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if all(word in line for word in words) and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


async def test_all_that_an_agent_asked_is_one_trajectory_token_for_token(tmp_path: Path) -> None:
    async with working(tmp_path, {"d": function("several_conversations")}) as (proxy, worker):
        (header,) = await play(worker, member("d"))
        await asyncio.sleep(0.1)
    assert (header.stop, header.outcome, header.turns) == (StopReason.TERMINATED, Reward(0.25), 7)
    trajectory = stored(tmp_path, header)
    engine = Counter(
        (
            payload["tokens"],
            generation.tokens.tobytes(),
            generation.logprobs.tobytes(),
            generation.versions.tobytes(),
        )
        for payload, generation in proxy.answers
    )
    captured: Counter[tuple[bytes, ...]] = Counter()
    for segment in trajectory.segments():
        for turn in segment.turns:
            kept = slice(turn.response_start, turn.response_end)
            captured[
                segment.tokens[: turn.response_start].tobytes(),
                segment.tokens[kept].tobytes(),
                segment.logprobs[kept].tobytes(),
                segment.versions[kept].tobytes(),
            ] += 1
    assert captured == engine
    assert trajectory.sampled_tokens == sum(len(generation.tokens) for _, generation in proxy.answers)
    assert len(trajectory.segment_starts) == 4  # the main one, two sub-agents, the completion
    assert {payload["seed"] for payload, _ in proxy.answers} == {turn_seed(100, turn) for turn in range(7)}
    info = trajectory.info
    actions = Counter(turn.action for turn in trajectory.turns)
    assert actions == Counter([*info["said"], *info["parts"], info["streamed"], info["done"]])
    names = {payload["trajectory"] for payload, _ in proxy.answers}
    name = str(header.key)
    assert names == {name, *(f"{name}#{number}" for number in (1, 2, 3))}
    assert set(proxy.finished) == names


async def test_a_program_is_trained_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    async with working(tmp_path, {"good": command("good"), "silent": command("silent")}) as (_, worker):
        good, silent = await play(worker, member("good"), member("silent", 1))
    assert (good.stop, good.outcome, good.turns) == (StopReason.TERMINATED, Reward(0.5), 1)
    trajectory = stored(tmp_path, good)
    assert trajectory.info == {"text": trajectory.turns[0].action, "seed": 7, "secret": False}
    assert (silent.stop, silent.outcome) == (StopReason.TERMINATED, Reward(0.0))
    assert running(SCRIPT) == []


async def test_agents_that_fail_end_as_typed_outcomes_and_leave_no_process(tmp_path: Path) -> None:
    domains = {
        "hangs": {
            **command(""),
            "options": {"command": ["sh", "-c", "sleep 600 & sleep 600"], "timeout_s": 1.5},
        },
        "fails": command("fail"),
        "forgiven": command("fail", failure_reward=0.125),
        "killed": command("killed"),
        "junk": command("junk"),
        "memory": command("memory", memory_mb=2048),
        "absent": {**command("x"), "options": {"command": ["no-such-program"]}},
        "stuck": function("hangs", timeout_s=0.5),
    }
    async with working(tmp_path, domains) as (_, worker):
        headers = await play(worker, *(member(name, number) for number, name in enumerate(domains)))
        assert running(SCRIPT) == []
        assert running("sleep", "600") == []
    found = dict(zip(domains, headers, strict=True))
    assert found["hangs"].stop is StopReason.ENVIRONMENT_TIMEOUT
    assert "domains.hangs.options.timeout_s" in found["hangs"].error
    for name, words in (
        ("fails", "exit code 1: it went wrong"),
        ("killed", "exit code -9"),
        ("junk", "`reward` must be a number"),
        ("memory", "MemoryError"),
        ("absent", "no-such-program: No such file"),
    ):
        assert found[name].stop is StopReason.ENVIRONMENT_ERROR
        assert words in found[name].error
        assert isinstance(found[name].outcome, InfraError)
    assert (found["forgiven"].stop, found["forgiven"].outcome) == (StopReason.TERMINATED, Reward(0.125))
    assert found["stuck"].stop is StopReason.ENVIRONMENT_TIMEOUT


async def test_a_budget_that_ran_out_is_why_the_episode_ended(tmp_path: Path) -> None:
    domains = {
        "polite": {**function("asks_for_ever"), "max_turns": 3},
        "rude": {**command("ask-on"), "max_turns": 3},
    }
    async with working(tmp_path, domains) as (_, worker):
        polite, rude = await play(worker, member("polite"), member("rude", 1))
    assert (polite.stop, polite.outcome, polite.turns) == (StopReason.MAX_TURNS, Reward(3.0), 3)
    assert (rude.stop, rude.outcome, rude.turns) == (StopReason.MAX_TURNS, Reward(0.0), 3)


async def test_an_abort_ends_the_agent_its_sessions_and_its_key(tmp_path: Path) -> None:
    domains = {"d": {**command("ask-on"), "max_turns": 10_000}}
    async with working(tmp_path, domains) as (proxy, worker):
        playing = asyncio.create_task(play(worker, member("d")))
        await asyncio.wait_for(proxy.busy.wait(), 60)
        assert worker._agents is not None
        (key,) = worker._agents.gateway._open
        name = str(member("d").key)
        await proxy.abort({"trajectories": [name], "reason": "cancelled"})
        (header,) = await asyncio.wait_for(playing, 10)
        assert (header.stop, header.name) == (StopReason.CANCELLED, None)
        assert isinstance(header.outcome, Skip)
        asked = len(proxy.began)
        async with openai.AsyncOpenAI(base_url=worker._agents.gateway.base_url, api_key=key) as client:
            with pytest.raises(openai.APIStatusError) as gone:
                await client.completions.create(model="policy", prompt="x")
        assert (gone.value.status_code, len(proxy.began)) == (410, asked)
        for _ in range(100):
            if not running(SCRIPT):
                break
            await asyncio.sleep(0.05)
        assert running(SCRIPT) == []
        await asyncio.sleep(0.1)
        assert set(proxy.began) <= set(proxy.finished)
        assert {each for each in proxy.began if "#" in each} <= set(proxy.aborted)


async def test_rows_of_data_are_picked_by_seed(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"value": value}) + "\n" for value in (0.1, 0.2, 0.3, 0.4)))
    async with working(tmp_path, {"d": function("counts", data=str(data))}) as (_, worker):
        (header,) = await play(worker, member("d"))
    assert header.outcome == Reward(0.4)  # seed 7 of 4 rows


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "set one of options.command, options.function and options.external"),
        ({"command": ["x"], "function": "a:b"}, "set one of"),
        ({"function": "a.b"}, "options.function"),
        ({"command": ["x"], "data": "/no/such/file"}, "options.data: there is no file"),
        ({"function": "a:b", "memory_mb": 3}, "options.memory_mb are of a command"),
        ({"command": ["x"], "timeout": 3}, "options.timeout"),
    ],
)
def test_options_that_cannot_run_are_named_before_anything_starts(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        DomainConfig(source="agent", options=options)
