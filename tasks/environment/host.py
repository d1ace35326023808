"""An environment host: a process that holds many environments, each driven by a thread of its own.

An environment that waits, for a tool or a network, keeps only its own thread waiting. The process can be
killed whole; `tasks.environment.hosts` decides when. Ops of its parent:

    open   [id, domain, seed]    -> first prompt
    step   [id, action, last]    -> [observation, reward, terminated, truncated, info]
    close  id                       (posted)

An environment closes by itself after a step that ended its episode, that was the `last` one, or that raised.
"""

import contextlib
import queue
from collections import deque
from threading import Thread
from typing import Any

from infra.parent_channel import ParentChannel
from tasks.environment.sources import make
from tasks.environment.sources.base import Environment, Interruptible, StepResult


class _Seat:
    """A thread that drives one environment at a time, from `open` to its close, and is then free again."""

    def __init__(self, host: "_Host"):
        self._host = host
        self.inbox: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self.environment: Environment | None = None
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            call_id, op, payload = self.inbox.get()
            if op == "open":
                self._episode(call_id, payload)

    def _episode(self, call_id: int, payload: list[Any]) -> None:
        host = self._host
        environment_id, domain, seed = payload
        environment: Environment | None = None
        try:
            self.environment = environment = make(*host.domains[domain])
            host.channel.answer(call_id, environment.reset(seed))
            ended = False
            while not ended:
                call_id, op, payload = self.inbox.get()
                if op == "close":
                    break
                _, action, last = payload
                result = _checked(environment.step(action))
                ended = last or result.terminated or result.truncated
                host.channel.answer(
                    call_id,
                    [result.observation, result.reward, result.terminated, result.truncated, result.info],
                )
        except BaseException as error:  # a SystemExit of the environment is its failure, not the host's
            host.channel.fail(call_id, error)
        host.seats.pop(environment_id, None)
        self.environment = None
        if environment is not None:
            with contextlib.suppress(Exception):  # the episode is over, whatever its close says
                environment.close()
        host.idle.append(self)


def _checked(result: StepResult) -> StepResult:
    if not isinstance(result, StepResult):
        raise TypeError(f"step must return a StepResult, not {type(result).__name__}")
    result.reward = float(result.reward)
    return result


class _Host:
    def __init__(self, channel: ParentChannel):
        self.channel = channel
        self.domains: dict[str, tuple[str, dict[str, Any]]] = {
            name: (domain["source"], domain["options"])
            for name, domain in channel.settings["domains"].items()
        }
        self.seats: dict[int, _Seat] = {}
        self.idle: deque[_Seat] = deque()

    def import_sources(self) -> None:
        """Pay for imports now, so that no reset's limit does. What fails here fails and is told there."""
        for source, options in self.domains.values():
            with contextlib.suppress(Exception):
                make(source, options).close()

    def serve(self) -> None:
        self.channel.ready()
        for message in self.channel.messages():
            call_id, op, payload = message
            if op == "open":
                seat = self.idle.pop() if self.idle else _Seat(self)
                self.seats[payload[0]] = seat
                seat.inbox.put(message)
                continue
            found = self.seats.get(payload if op == "close" else payload[0])
            if found is not None:
                if op == "close" and isinstance(found.environment, Interruptible):
                    found.environment.interrupt()
                found.inbox.put(message)
            elif call_id is not None:
                self.channel.fail(call_id, LookupError("the episode of this environment is over"))


if __name__ == "__main__":
    host = _Host(ParentChannel())
    host.import_sources()
    host.serve()
