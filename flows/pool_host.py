"""The flow that lives on a work pool as long as a campaign's run needs that pool.

It holds the services of its roles (`infra.pools.host`), and carries out each stage that the campaign gives it
as a task run of its own: so the dashboard shows on which pool and worker a stage ran.
"""

import asyncio
import contextvars
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from prefect import flow, get_run_logger, tags, task
from prefect.blocks.system import Secret
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from infra.pools.host import PoolHost, Ticket


@task(cache_policy=NO_CACHE, persist_result=False)
async def stage(body: Callable[[], Awaitable[Any]]) -> Any:
    """What the campaign asked for, whatever it is; its title is the task run's name."""
    result = await body()
    if isinstance(result, dict):
        get_run_logger().info("%s", {name: value for name, value in result.items() if _is_scalar(value)})
    return result


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


@flow(name="pool-host", log_prints=True, persist_result=False)
async def pool_host(ticket: str, run: str) -> None:
    """Serve a campaign's run until it ends. `ticket` names the Secret block, used once, that leads to it.

    Raises `CampaignGone` when the campaign ended without a word, by a crash or a kill.
    """
    block: Any = await Secret.aload(ticket)
    parsed = Ticket.model_validate(block.get())
    await Secret.adelete(ticket)
    print(f"host of {parsed.pool} for {run}, process on {socket.gethostname()}")
    context = contextvars.copy_context()

    async def run_stage(title: str, body: Callable[[], Awaitable[Any]]) -> Any:
        named = stage.with_options(name=title.split()[0], task_run_name=title)
        # In the flow's own context: a connection's handlers have another, or none.
        return await asyncio.create_task(named(body), context=context.copy())

    with tags(run, parsed.pool):
        context = contextvars.copy_context()
        about = {
            "flow_run_id": str(flow_run.get_id() or ""),
            "flow_run_name": str(flow_run.get_name() or ""),
            "machine": socket.gethostname(),
        }
        await PoolHost(parsed, run_stage).serve(about)
    print("the campaign needs this host no longer")
