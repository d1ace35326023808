"""Which work pools a campaign gets, asked of a real Prefect server with pools, workers and deployments."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.pools import PoolUnavailable, bound_pools, check_pools
from tasks.bindings import BindingsFile
from tasks.campaign import Campaign

pytestmark = pytest.mark.slow
ONLINE = ("spare-h200", "h20", "boxes")


@pytest.fixture(scope="module")
def server(prefect_server: dict[str, str]) -> Iterator[None]:
    with temporary_settings({PREFECT_API_URL: prefect_server["PREFECT_API_URL"]}):
        yield


@pytest.fixture
async def client(server: None) -> AsyncIterator[PrefectClient]:
    async with get_client() as found:
        for pool in ONLINE:
            await found.create_work_pool(WorkPoolCreate(name=pool, type="process"), overwrite=True)
            await found.send_worker_heartbeat(work_pool_name=pool, worker_name="worker")
            queues = await found.read_work_queues(work_pool_name=pool)
            if "affine" not in {queue.name for queue in queues}:
                await found.create_work_queue(name="affine", work_pool_name=pool)
            host = await found.create_flow_from_name("pool-host")
            await found.create_deployment(flow_id=host, name=pool, work_pool_name=pool)
        yield found


def campaign(**pools: Any) -> Campaign:
    roles = {"rollout": "h20", "train": "h20", "environment": "boxes", "reward": "boxes", "queue": "affine"}
    return Campaign.parse(
        {"name": "asked", "domains": {"sums": {"source": "gem"}}, "pools": {**roles, **pools}}
    )


async def test_pools_that_can_serve_are_taken_as_they_are(client: PrefectClient) -> None:
    asked = campaign()
    assert await bound_pools(asked) == asked.pools


async def test_a_pool_that_is_not_there_is_replaced_by_the_nearest_spare_and_stays_so(
    client: PrefectClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = campaign(train="h800", hardware={"spare-h200": "H200", "boxes": "cpu"})
    await check_pools(asked)
    caplog.clear()
    file = BindingsFile(tmp_path)
    assert (await bound_pools(asked, file)).train == "spare-h200"
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "tasks.rollout.affinity"]
    assert warning == "pools.train: pool 'spare-h200' in the place of 'h800': 'h800' is not available"
    (binding,) = file.bindings("pools.train")
    assert (binding.requested, binding.pool) == ("h800", "spare-h200")


async def test_without_a_compatible_pool_the_first_problem_and_the_remedy_are_said(
    client: PrefectClient,
) -> None:
    with pytest.raises(PoolUnavailable) as raised:
        await check_pools(campaign(train="mystery"))
    message = str(raised.value)
    assert message.startswith("pools.train: Prefect has no work pool 'mystery'")
    assert "name it under pools.hardware" in message
