"""The work pools and queues of a cluster, in its Prefect server."""

import contextlib
from collections.abc import Mapping

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists
from prefect.workers.process import ProcessWorker


async def make_work_pools(api_url: str, pools: Mapping[str, str], queues: Mapping[str, int]) -> None:
    """Make pools of the type `process` with these descriptions, and in each of them queues with these
    priorities. What exists stays."""
    template = ProcessWorker.get_default_base_job_template()
    async with PrefectClient(api_url) as client:
        for pool, description in pools.items():
            with contextlib.suppress(ObjectAlreadyExists):
                await client.create_work_pool(
                    WorkPoolCreate(
                        name=pool, type="process", description=description, base_job_template=template
                    )
                )
            known = {queue.name for queue in await client.read_work_queues(work_pool_name=pool)}
            for queue, priority in queues.items():
                if queue in known:
                    continue
                await client.create_work_queue(queue, work_pool_name=pool, priority=priority)
