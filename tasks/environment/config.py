"""What a campaign says of its domains and of where their environments run."""

from typing import Any

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from infra.config import Config
from tasks.environment.openai.config import AgentOptions, agent_options


class DomainConfig(Config):
    """One domain: a kind of RL task, its environment, its budgets and its reward."""

    source: str
    """`gymnasium`, `gem`, `reasoning_gym`, `agent` (a program that uses the `openai` client), or
    `package.module:Class` of an environment of your own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the source, for example `id` and `is_slippery`. Those of `agent` are
    `tasks.environment.openai.config.AgentOptions`."""
    system_prompt: str | None = None
    """Said to the policy before the first prompt. Empty, the chat template's own default holds."""
    weight: PositiveFloat = 1.0
    """Share of the batch's groups, relative to the other domains' weights."""
    max_turns: PositiveInt = 1
    """Responses in one episode; of an agent, those of all its conversations together."""
    max_turn_tokens: PositiveInt = 16
    """Budget of sampled tokens in one turn."""
    max_tokens: PositiveInt = 256
    """Budget of the whole trajectory: prompts, observations and sampled tokens. Where a chat template breaks
    the trajectory into segments, it is the budget of each."""
    reset_limit_s: PositiveFloat = 30.0
    """A reset that takes longer is killed; the trajectory ends with `environment_timeout`."""
    step_limit_s: PositiveFloat = 10.0
    """A step that takes longer is killed; the trajectory ends with `environment_timeout`."""
    reward: str = "environment_return"
    """Name of a registered reward function, or `package.module:function`."""
    reward_limit_s: PositiveFloat = 10.0
    """A reward that takes longer is killed; its outcome is an infrastructure error."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest possible reward; evaluation intervals are scaled to it."""

    @property
    def agent(self) -> AgentOptions | None:
        """The agent that is this domain's environment, if one is."""
        return agent_options(self.options) if self.source == "agent" else None

    @model_validator(mode="after")
    def _agent_can_run(self) -> "DomainConfig":
        try:
            agent = self.agent
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(['options', *map(str, each['loc'])])}: "
                + each["msg"].removeprefix("Value error, ")
                for each in error.errors()
            )
            raise ValueError(problems) from None
        if agent is not None and self.system_prompt:
            raise ValueError("system_prompt is not used with source agent: the agent writes its own messages")
        return self

    @model_validator(mode="after")
    def _budgets_fit(self) -> "DomainConfig":
        if self.max_turn_tokens >= self.max_tokens:
            raise ValueError(
                f"max_turn_tokens ({self.max_turn_tokens}) must be below max_tokens ({self.max_tokens}), "
                "which also holds the prompt"
            )
        low, high = self.reward_range
        if low >= high:
            raise ValueError(f"reward_range must be [lowest, highest], not [{low}, {high}]")
        return self


class EnvironmentConfig(Config):
    """Where environments run: a Dask cluster, and in each of its workers killable host processes."""

    workers: PositiveInt = 1
    """Dask worker processes started here; unused when `scheduler` is set."""
    scheduler: str | None = None
    """Address of a running Dask scheduler; a local cluster is started without one."""
    concurrent_trajectories: PositiveInt = 256
    """Trajectories that one Dask worker drives at a time. 1 makes a run deterministic."""
    gateway_host: str = "127.0.0.1"
    """Address of a Dask worker's machine on which it serves agents (domains of source `agent`). Loopback is
    right for those it starts itself; `auto` is the address by which it reaches the proxy."""
    gateway_port: NonNegativeInt = 0
    """Port of that; 0 takes a free one. Agents that run elsewhere need a fixed one, of one Dask worker a
    machine."""
    hosts: PositiveInt = 1
    """Killable processes per Dask worker that hold the environments themselves."""
    attempts: PositiveInt = 2
    """Tries of one member when its environment or engine fails, before the group goes on without it."""
    failure_budget: NonNegativeInt = 200
    """Failed trajectories in one step after which the campaign stops with an error."""
