"""The agents of one environment worker: their endpoint, and the engines' sessions that each one has."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable

from tasks.environment.config import DomainConfig
from tasks.environment.episode import AbortSwitch, Episode
from tasks.environment.openai.agent_text import AgentText
from tasks.environment.openai.config import AgentOptions
from tasks.environment.openai.episode import AgentProcess, run_agent_episode
from tasks.environment.openai.gateway import AgentGateway, GatewayError
from tasks.environment.openai.run import AgentRun
from tasks.environment.rendering import ChatRenderer, Ids
from tasks.rollout.engines.base import Generation
from tasks.trajectory import MemberSpec

TOKEN_VARIABLE = "TUTTI_AGENT_TOKEN"
SessionGenerate = Callable[[str, Ids, int, int], Awaitable[Generation]]
"""(session's name, context, tokens at most, index of the turn) -> what was sampled."""


class AgentServing:
    """Made by `start`. A trajectory's conversations are sessions of their own towards the engines, since one
    has one request at a time: `NAME`, `NAME#1`, `NAME#2` ..."""

    def __init__(self, gateway: AgentGateway, text: AgentText, context_limit: int | None):
        self.gateway = gateway
        self._text = text
        self._context_limit = context_limit
        self._sessions: dict[str, set[str]] = {}

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        renderer: ChatRenderer,
        context_limit: int | None,
        token: str | None = None,
    ) -> "AgentServing":
        """With a `token`, agents that run elsewhere may take episodes.

        Raises `GatewayError`, and `TemplateError` where the chat template cannot serve agents.
        """
        text = await asyncio.to_thread(AgentText, renderer)
        return cls(await AgentGateway.start(host, port, token), text, context_limit)

    async def close(self) -> None:
        await self.gateway.close()

    async def episode(
        self,
        spec: MemberSpec,
        domain: DomainConfig,
        options: AgentOptions,
        name: str,
        agent: AgentProcess,
        generate: SessionGenerate,
        switch: AbortSwitch,
        admitted: Callable[[], Awaitable[None]],
    ) -> Episode:
        """Run the agent of one trajectory, whose name on the wire is `name`."""
        sessions = self._sessions[name] = set()

        async def of_session(session: int, context: Ids, max_new_tokens: int, turn: int) -> Generation:
            session_name = f"{name}#{session}" if session > 0 else name
            sessions.add(session_name)
            return await generate(session_name, context, max_new_tokens, turn)

        run = AgentRun(domain, of_session, self._text, self._context_limit, options.max_tool_repairs)
        return await run_agent_episode(
            spec,
            agent,
            options,
            run,
            self.gateway.serving,
            self.gateway.offers.offer,
            switch=switch,
            admitted=admitted,
        )

    def sessions_beside(self, name: str) -> list[str]:
        """The sessions of a trajectory that the control plane, which knows only `name`, does not know of."""
        return sorted(self._sessions.get(name, set()) - {name})

    def forget(self, name: str) -> None:
        """The trajectory is over. Nothing happens where it is none of an agent."""
        self._sessions.pop(name, None)


def external_token(agents: Iterable[AgentOptions], port: int) -> str | None:
    """What agents that run elsewhere show to take episodes; None where there are none of them.

    Raises `GatewayError` where they could not find or use the endpoint.
    """
    if not any(agent.external for agent in agents):
        return None
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise GatewayError(
            f"options.external needs a token: set {TOKEN_VARIABLE} for the environment workers"
        )
    if port == 0:
        raise GatewayError("options.external needs a port that agents know: set environment.gateway_port")
    return token
