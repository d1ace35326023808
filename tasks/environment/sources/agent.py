"""An agent as an environment: its episode is one step, in which its whole program runs.

It lives on an environment host, like every environment, so that a function that hangs is killed with its
host, and a command with its process group.
"""

import asyncio
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from infra.credentials import without_credentials
from tasks.environment.openai.config import AgentOptions
from tasks.environment.sources.base import StepResult

_SHOWN_BYTES = 1 << 16
_LIMITED = Path(__file__).with_name("limited_process.py")


@dataclass(frozen=True, slots=True)
class AgentAccess:
    """What a function makes its client of: `OpenAI(base_url=access.base_url, api_key=access.api_key)`."""

    base_url: str
    api_key: str
    model: str


class AgentFailed(RuntimeError):
    """The agent exited with an error, or printed a result that is none."""


class AgentEnvironment:
    """One episode of an agent. `options` are of `AgentOptions`."""

    def __init__(self, **options: Any):
        self._options = AgentOptions(**options)
        self._function = _imported(self._options.function) if self._options.function else None
        self._task: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False

    def reset(self, seed: int) -> str:
        """The task, as JSON: the seed, and its row of the data."""
        rows = _rows(self._options.data) if self._options.data else ()
        self._task = {"seed": seed, "row": json.loads(rows[seed % len(rows)]) if rows else None}
        return json.dumps(self._task)

    def step(self, action: str) -> StepResult:
        """Run the agent with the access in `action`. Raises `AgentFailed`, or what a function raises.

        A command that was killed for its time says so in the result's info (`timed_out`).
        """
        access = AgentAccess(**json.loads(action))
        try:
            if self._function is not None:
                said = self._function(self._task, access)
                result = asyncio.run(_awaited(said)) if inspect.isawaitable(said) else said
                return result_of(result, "" if result is None else json.dumps(result))
            return self._command(access)
        except Exception as error:
            if self._options.failure_reward is None:
                raise
            failure = f"{type(error).__name__}: {error}"
            return StepResult(failure, self._options.failure_reward, True, info={"failure": failure})

    def interrupt(self) -> None:
        """Kill the command, from another thread."""
        with self._lock:
            self._over = True
            _kill(self._process)

    def close(self) -> None:
        self.interrupt()

    def _command(self, access: AgentAccess) -> StepResult:
        options = self._options
        environment = {
            **without_credentials(os.environ),
            **options.env,
            "OPENAI_BASE_URL": access.base_url,
            "OPENAI_API_KEY": access.api_key,
            "OPENAI_MODEL": access.model,
        }
        memory = options.memory_mb << 20 if options.memory_mb else 0
        limited = [sys.executable, "-I", "-S", str(_LIMITED), str(memory), str(os.getpid())]
        with (
            tempfile.TemporaryFile() as task,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            task.write(json.dumps(self._task).encode())
            task.seek(0)
            with self._lock:
                if self._over:
                    raise AgentFailed("the episode was over before its agent began")
                self._process = process = subprocess.Popen(
                    [*limited, *options.command],
                    stdin=task,
                    stdout=out,
                    stderr=err,
                    env=environment,
                    start_new_session=True,
                )
            try:
                code = process.wait(options.timeout_s)
            except subprocess.TimeoutExpired:
                return StepResult("", 0.0, True, info={"timed_out": True})
            finally:
                with self._lock:
                    _kill(process)  # what it left behind goes with it
                    self._process = None
                process.wait()
            printed = _tail(out)
            if code != 0:
                raise AgentFailed(
                    f"exit code {code}: {_tail(err).strip()[-500:] or 'nothing on standard error'}"
                )
        last = printed.strip().rpartition("\n")[2]
        try:
            value = json.loads(last)
        except ValueError:
            value = None
        return result_of(value if isinstance(value, dict) else None, printed)


def result_of(value: Any, printed: str) -> StepResult:
    """What an agent said of its episode: an object with `reward` and `info`, a number, or nothing.

    Raises `AgentFailed`.
    """
    if isinstance(value, int | float):
        value = {"reward": value}
    if value is not None and not isinstance(value, dict):
        raise AgentFailed(f"a result must be an object, a number or nothing, not {type(value).__name__}")
    given = value or {}
    reward, info = given.get("reward", 0.0), given.get("info", {})
    if isinstance(reward, str | bytes) or not isinstance(reward, int | float) or not isinstance(info, dict):
        raise AgentFailed("the result's `reward` must be a number, and its `info` an object")
    return StepResult(printed[-_SHOWN_BYTES:], float(reward), terminated=True, info=info)


async def _awaited(said: Any) -> Any:
    return await said


def _imported(target: str) -> Callable[[dict[str, Any], AgentAccess], Any]:
    module, _, name = target.partition(":")
    function: Callable[[dict[str, Any], AgentAccess], Any] = getattr(importlib.import_module(module), name)
    return function


@lru_cache(maxsize=8)
def _rows(path: str) -> tuple[str, ...]:
    rows = tuple(line for line in Path(path).read_text().splitlines() if line.strip())
    if not rows:
        raise ValueError(f"options.data: {path} has no row")
    return rows


def _tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _SHOWN_BYTES))
    return file.read().decode(errors="replace")


def _kill(process: "subprocess.Popen[bytes] | None") -> None:
    if process is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
