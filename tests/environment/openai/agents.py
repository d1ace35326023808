"""Agents as their authors would write them, with the `openai` client and nothing of Tutti's."""

import asyncio
import json
import threading
from typing import Any

from openai import APIStatusError, AsyncOpenAI, OpenAI

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}},
            "required": ["word"],
        },
    },
}


async def several_conversations(task: dict[str, Any], access: Any) -> dict[str, Any]:
    """A conversation of three turns with a tool, two sub-agents beside it, a stream and a completion."""
    async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:

        async def ask(messages: list[Any], **options: Any) -> str:
            answer = await client.chat.completions.create(
                model=access.model, messages=messages, max_tokens=10, **options
            )
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            return answer.choices[0].message.content or ""

        main: list[Any] = [{"role": "user", "content": f"Begin {task['seed']}."}]
        await ask(main, tools=[TOOL])
        subs: list[list[Any]] = [
            [{"role": "system", "content": "Be quick."}, {"role": "user", "content": f"Part {part}."}]
            for part in range(2)
        ]
        parts = await asyncio.gather(*(ask(sub) for sub in subs))
        for turn in range(2):
            main.append({"role": "user", "content": f"{turn}: {' '.join(parts)}"})
            await ask(main, tools=[TOOL])
        stream = await client.chat.completions.create(
            model=access.model, messages=subs[0] + [{"role": "user", "content": "On."}], stream=True
        )
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        done = await client.completions.create(model=access.model, prompt="Once", max_tokens=5)
    said = [message["content"] for message in main if message["role"] == "assistant"]
    return {
        "reward": 0.25,
        "info": {"said": said, "parts": parts, "streamed": streamed, "done": done.choices[0].text},
    }


def hangs(task: dict[str, Any], access: Any) -> None:
    threading.Event().wait()


def asks_for_ever(task: dict[str, Any], access: Any) -> float:
    """Asks until it is refused, and says how often it was answered."""
    client = OpenAI(base_url=access.base_url, api_key=access.api_key)
    answered = 0
    while True:
        try:
            client.chat.completions.create(
                model=access.model, messages=[{"role": "user", "content": json.dumps(answered)}], max_tokens=4
            )
        except APIStatusError:
            return float(answered)
        answered += 1


def counts(task: dict[str, Any], access: Any) -> float:
    client = OpenAI(base_url=access.base_url, api_key=access.api_key)
    client.completions.create(model=access.model, prompt="x", max_tokens=4)
    return float(task["row"]["value"])
