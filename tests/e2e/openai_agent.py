"""An agent that knows nothing of Tutti: a tool, a sub-agent and a stream, with the `openai` client."""

import json
import os
import sys

from openai import OpenAI

task = json.load(sys.stdin)
client, model = OpenAI(), os.environ["OPENAI_MODEL"]
weather = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

messages = [{"role": "user", "content": f"Plan trip {task['seed']}."}]
for _ in range(2):
    answer = (
        client.chat.completions.create(model=model, messages=messages, tools=[weather]).choices[0].message
    )
    messages.append(answer.model_dump(exclude_none=True))
    for call in answer.tool_calls or []:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    if not answer.tool_calls:
        messages.append({"role": "user", "content": "And then?"})

critic = [{"role": "system", "content": "You judge plans."}, {"role": "user", "content": "Good?"}]
stream = client.chat.completions.create(model=model, messages=critic, stream=True)
verdict = "".join(chunk.choices[0].delta.content or "" for chunk in stream)

letters = sum(character.isalpha() for character in verdict)
print(json.dumps({"reward": letters / max(1, len(verdict)), "info": {"verdict": verdict}}))
