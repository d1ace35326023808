"""The proxy's service, on one core: `python -m tests.bench.pinned_proxy` with the core in its settings."""

import os
from collections.abc import Callable
from typing import Any

from tasks.rollout.proxy_service import serve_proxy


async def serve_pinned(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Settings: those of the proxy, and core."""
    os.sched_setaffinity(0, {settings.pop("core")})
    await serve_proxy(settings, ready)


if __name__ == "__main__":
    from infra.processes import serve

    serve(serve_pinned)
