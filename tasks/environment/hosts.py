"""Environment hosts, seen from the worker: where an environment lives, and what happens when it hangs.

A step cannot be interrupted from outside its process, and the process is shared. So when one hangs, its
trajectory ends with `EnvironmentTimeout`, its host takes no new episode, the others on it go on, and the host
is killed when the last of them has ended or after a drain limit. A fresh host takes its place at once.
"""

import asyncio
import itertools
import logging
from collections.abc import Mapping
from typing import Any

from infra.children import Child, ChildDied, ChildRaised, ChildTimeout
from tasks.environment.config import DomainConfig
from tasks.environment.sources.base import StepResult

logger = logging.getLogger(__name__)


class EnvironmentFault(RuntimeError):
    """An episode that its environment cannot go on with."""


class EnvironmentRaised(EnvironmentFault):
    """The environment raised in reset or step; the message is the exception's type and text."""


class EnvironmentTimeout(EnvironmentFault):
    """Reset or step took longer than `reset_limit_s` or `step_limit_s` of the domain."""


class EnvironmentHostDied(EnvironmentFault):
    """The process that held the environment ended: it crashed, or another environment on it hung."""


class _Host:
    def __init__(self, child: Child):
        self.child = child
        self.live: set[int] = set()
        self.draining = False


class EnvironmentHosts:
    """A constant number of hosts for new episodes, and those still draining."""

    def __init__(self, domains: Mapping[str, DomainConfig], hosts: int, drain_limit_s: float = 60.0):
        self._domains = domains
        self._settings = {
            "domains": {
                name: {"source": domain.source, "options": domain.options} for name, domain in domains.items()
            }
        }
        self._drain_limit_s = drain_limit_s
        self._ids = itertools.count()
        self._serving: list[_Host] = []
        self._draining: set[_Host] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._wanted = hosts
        self._arrival = asyncio.Event()
        self._failure = ""

    async def start(self) -> None:
        """Raises `EnvironmentHostDied` when no host comes up."""
        self._fill()
        await asyncio.gather(*self._starting)
        if not self._serving:
            raise EnvironmentHostDied(self._failure)

    async def close(self) -> None:
        self._wanted = 0
        starting = list(self._starting)
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        hosts = [*self._serving, *self._draining]
        self._serving.clear()
        await asyncio.gather(*(host.child.stop() for host in hosts))

    @property
    def pids(self) -> list[int]:
        """Process ids of the hosts that take new episodes."""
        return [host.child.pid for host in self._serving]

    def environment(self, domain: str) -> "HostedEnvironment":
        """A new environment of the domain; its host is chosen at reset."""
        return HostedEnvironment(self, domain, self._domains[domain], next(self._ids))

    async def _least_loaded(self) -> _Host:
        while not self._serving:
            self._fill()
            self._arrival.clear()
            await self._arrival.wait()
            if not self._serving and not self._starting:
                raise EnvironmentHostDied(self._failure)
        return min(self._serving, key=lambda host: len(host.live))

    def _fill(self) -> None:
        while len(self._serving) + len(self._starting) < self._wanted:
            task = asyncio.get_running_loop().create_task(self._start_one())
            self._starting.add(task)
            task.add_done_callback(self._started)

    async def _start_one(self) -> None:
        try:
            child = await Child.start("tasks.environment.host", self._settings, on_exit=self._exited)
        except ChildDied as error:
            self._failure = f"an environment host did not start: {error}"
            logger.error(self._failure)
            return
        self._serving.append(_Host(child))

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        self._arrival.set()

    def _exited(self, child: Child) -> None:
        for host in list(self._serving):
            if host.child is child:
                logger.error("an environment host with %d live episodes ended", len(host.live))
                self._serving.remove(host)
                self._fill()
        self._draining = {host for host in self._draining if host.child is not child}

    def _hung(self, host: _Host, environment_id: int) -> None:
        host.live.discard(environment_id)
        if not host.draining and host in self._serving:
            host.draining = True
            self._serving.remove(host)
            self._draining.add(host)
            asyncio.get_running_loop().call_later(self._drain_limit_s, host.child.kill)
            self._fill()
        self._kill_if_empty(host)

    def _left(self, host: _Host, environment_id: int) -> None:
        host.live.discard(environment_id)
        self._kill_if_empty(host)

    def _kill_if_empty(self, host: _Host) -> None:
        if host.draining and not host.live:
            host.child.kill()


class HostedEnvironment:
    """One episode's environment, on some host. `reset` once, `step` until the episode ends, then `close`."""

    def __init__(self, hosts: EnvironmentHosts, domain: str, config: DomainConfig, environment_id: int):
        self._hosts = hosts
        self._domain = domain
        self._config = config
        self._id = environment_id
        self._host: _Host | None = None

    async def reset(self, seed: int) -> str:
        """Make the environment and begin the episode of `seed`. Raises an `EnvironmentFault`."""
        self._host = host = await self._hosts._least_loaded()
        host.live.add(self._id)
        prompt = await self._ask("open", [self._id, self._domain, seed], self._config.reset_limit_s, "reset")
        if not isinstance(prompt, str):
            raise EnvironmentRaised(f"reset must return text, not {type(prompt).__name__}")
        return prompt

    async def step(self, action: str, last: bool = False, limit_s: float | None = None) -> StepResult:
        """Take an action; `last` promises that no other follows. Raises an `EnvironmentFault`.

        `limit_s` replaces the domain's `step_limit_s`.
        """
        payload = [self._id, action, last]
        observation, reward, terminated, truncated, info = await self._ask(
            "step", payload, limit_s if limit_s is not None else self._config.step_limit_s, "step"
        )
        if last or terminated or truncated:
            self._leave()
        return StepResult(observation, reward, terminated, truncated, info)

    def close(self) -> None:
        """End the episode, also while a step is running; does not wait. Closing twice is not an error."""
        if self._host is not None:
            self._host.child.post("close", self._id)
            self._leave()

    def _leave(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            self._hosts._left(host, self._id)

    async def _ask(self, op: str, payload: list[Any], limit_s: float, what: str) -> Any:
        host = self._host
        if host is None:
            raise EnvironmentRaised(f"{what} of an environment whose episode is over")
        try:
            return await host.child.request(
                op, payload, limit_s, on_timeout=lambda: self._hosts._hung(host, self._id)
            )
        except ChildRaised as error:
            self._leave()
            raise EnvironmentRaised(str(error)) from None
        except ChildTimeout:
            self._host = None
            raise EnvironmentTimeout(
                f"{what} took longer than {limit_s:g} s: see domains.{self._domain}.{what}_limit_s"
            ) from None
        except ChildDied:
            self._host = None
            raise EnvironmentHostDied(f"the environment's process ended before or during {what}") from None
