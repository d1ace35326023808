"""Chat templates beside those of `tests.environment.chat`, and a text of any of them."""

from pathlib import Path

from tasks.environment.openai.agent_text import AgentText
from tasks.environment.rendering import ChatRenderer
from tests.environment import chat

WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n"
    "</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{% if message.content or not loop.first %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Hermes' and Qwen's layout of tools."""


def text_of(directory: Path, template: str) -> AgentText:
    return AgentText(ChatRenderer(chat.save(directory, template)))
