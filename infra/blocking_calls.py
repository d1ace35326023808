"""Blocking calls to servers that may never answer, in threads that no exit waits for."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from infra.virtual_time import VirtualTimeLoop

Answer = TypeVar("Answer")


def in_daemon_thread(call: Callable[[], Answer]) -> asyncio.Future[Answer]:
    """Run `call` in a daemon thread of its own. Who no longer waits for the future leaves it behind.

    `asyncio.to_thread` is quicker, but a process does not end before its calls have. On a virtual-time loop
    the call is made here and now.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualTimeLoop):
        return loop.run_in_executor(None, call)
    done: asyncio.Future[Answer] = loop.create_future()
    # Read here too, since nobody may be waiting any more by the time it fails.
    done.add_done_callback(lambda future: future.cancelled() or future.exception())

    def succeed(answer: Answer) -> None:
        if not done.done():
            done.set_result(answer)

    def fail(error: Exception) -> None:
        if not done.done():
            done.set_exception(error)

    def run() -> None:
        try:
            answer = call()
        except Exception as error:
            if not loop.is_closed():
                loop.call_soon_threadsafe(fail, error)
            return
        if not loop.is_closed():
            loop.call_soon_threadsafe(succeed, answer)

    threading.Thread(target=run, daemon=True, name="blocking-call").start()
    return done
