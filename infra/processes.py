"""Service processes: a Python module that serves in a process of its own and never outlives its parent.

The parent writes the service's settings as one JSON line to the child's standard input and then holds that
pipe open as a life line: when the parent ends, by whatever signal, the child reads end-of-file and exits.
The child prints one JSON line (`{"url": ...}`) once it serves. Settings do not travel as arguments, so a
token never shows in a process list.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


class ServiceFailed(RuntimeError):
    """A service process ended, or did not start in time. The message names its log."""


class ServiceProcess:
    """A running service, seen from its parent."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path, ready: dict[str, Any]):
        self.name = name
        self.process = process
        self.log = log
        self.ready = ready

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        settings: dict[str, Any],
        log: Path,
        *,
        environment: dict[str, str] | None = None,
        start_limit_s: float = 120.0,
    ) -> "ServiceProcess":
        """Start `python -m module` and return once it serves.

        Raises `ServiceFailed` with the end of its log when it exits or stays silent for `start_limit_s`.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        try:
            async with asyncio.timeout(start_limit_s):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        except BaseException:
            cls(name, process, log, {}).kill()
            raise
        if not line:
            service = cls(name, process, log, {})
            await service.stop()
            raise ServiceFailed(f"{name} did not start; the end of {log}:\n{tail(log)}")
        return cls(name, process, log, json.loads(line))

    async def wait(self) -> int:
        return await self.process.wait()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Ask it to end by closing its life line; kill its whole process group after `grace_s`."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            async with asyncio.timeout(grace_s):
                await self.process.wait()
        except TimeoutError:
            self.kill()
            await self.process.wait()

    def kill(self) -> None:
        """SIGKILL to the service and every process of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "(no log)"


def serve(main: Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], Awaitable[None]]) -> None:
    """The child's side: read the settings, run `main(settings, ready)` on an event loop, end with the parent.

    `main` serves until it is cancelled, and calls `ready({"url": ...})` once it does.
    """
    wake_with_parent()
    settings = json.loads(sys.stdin.buffer.readline())
    with asyncio.Runner(loop_factory=_event_loop) as runner:
        runner.run(_serve(main, settings))


async def _serve(
    main: Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], Awaitable[None]],
    settings: dict[str, Any],
) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main(settings, _announce))
    parent_gone = asyncio.Event()

    def watch() -> None:
        # Not through sys.stdin: a thread that waits inside its buffer aborts the interpreter's exit.
        while os.read(sys.stdin.fileno(), 4096):
            continue
        try:
            loop.call_soon_threadsafe(parent_gone.set)
        except RuntimeError:
            return
        # An event loop that cannot run the graceful exit must not keep the process alive.
        threading.Timer(10.0, os._exit, [1]).start()

    threading.Thread(target=watch, daemon=True, name="life-line").start()
    loop.add_signal_handler(signal.SIGTERM, parent_gone.set)
    gone = asyncio.ensure_future(parent_gone.wait())
    await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        gone.cancel()
        await task
        return
    task.cancel()
    await asyncio.wait({task}, timeout=5.0)
    os._exit(0)


def wake_with_parent() -> None:
    """When the parent dies, the system wakes this process if it is frozen, so that it can follow.

    A running process takes no notice of SIGCONT. Linux only; elsewhere a frozen orphan stays.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _announce(ready: dict[str, Any]) -> None:
    print(json.dumps(ready), flush=True)


def _event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
