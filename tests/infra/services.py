"""A small service that the process tests start as `python -m tests.infra.services`."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

from infra.processes import serve


async def main(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    if settings.get("fail"):
        raise RuntimeError("this service cannot start")
    if settings.get("silent"):
        await asyncio.Event().wait()
    child = await asyncio.create_subprocess_exec(
        "sleep", "600", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
    )
    ready({"url": "http://127.0.0.1:0", "pid": os.getpid(), "child": child.pid, "said": settings["say"]})
    await asyncio.Event().wait()


if __name__ == "__main__":
    serve(main)
