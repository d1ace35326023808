"""What a campaign says of an agent that is a domain of its own (`source: agent`)."""

from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from infra.config import Config


class AgentOptions(Config):
    """`options` of a domain whose source is `agent`."""

    command: tuple[str, ...] = ()
    """A program and its arguments. It finds OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its
    environment and its task on standard input, as JSON `{"seed": ..., "row": ...}`. If the last line that it
    prints is a JSON object, its `reward` and `info` are the episode's. Exit code 0 is success."""
    function: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
    """`package.module:function` instead of a command, run in a warm process: `function(task, access)`, plain
    or async, with `access.base_url`, `access.api_key` and `access.model`; it returns what a command prints,
    a number as its reward, or nothing."""
    external: bool = False
    """The agent runs elsewhere instead: a process that knows `environment.gateway_host` and `gateway_port`
    takes an episode from `POST /tutti/v1/episodes` with the token in the variable TUTTI_AGENT_TOKEN of the
    environment workers, plays it, and hands in what a command would print."""
    data: str | None = None
    """A JSON Lines file; the episode of seed s gets row s modulo the number of rows. Empty: the row is null
    and the task is its seed."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of a command, beside the worker's own without its credentials."""
    timeout_s: PositiveFloat = 300.0
    """An agent that takes longer is killed; the trajectory ends with `environment_timeout`."""
    memory_mb: PositiveInt | None = None
    """Address space that a command may use."""
    failure_reward: float | None = None
    """Reward of an agent that raises or exits with an error, which is then its policy's fault. Empty: the
    trajectory ends with `environment_error` and may be tried again."""
    max_tool_repairs: NonNegativeInt = 2
    """How often in one call a response whose tool calls are all malformed goes back to the policy with the
    error, before the agent gets it as text."""

    @model_validator(mode="after")
    def _one_agent(self) -> "AgentOptions":
        if [bool(self.command), self.function is not None, self.external].count(True) != 1:
            raise ValueError("set one of options.command, options.function and options.external")
        if not self.command and (self.env or self.memory_mb):
            raise ValueError(
                "options.env and options.memory_mb are of a command: a function shares a process"
            )
        if self.data is not None and not Path(self.data).is_file():
            raise ValueError(f"options.data: there is no file {self.data}")
        return self


def agent_options(options: dict[str, Any]) -> AgentOptions:
    """Raises ValueError (pydantic's) with the option to change."""
    return AgentOptions.model_validate(options)
