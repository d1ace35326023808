"""Pool hosts and their campaign, in one event loop; what they start are real processes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.pools.host import CampaignGone, PoolHost, Ticket
from infra.pools.launcher import HostedService, HostLost, PoolLauncher, Rendezvous
from infra.processes import ServiceFailed
from infra.rpc import ConnectionLost, RpcClient, RpcError

TOKEN = "of-this-run"
ECHO = "tests.infra.pools.echo"
ROLES: Any = {"rollout": ("fast", "wide"), "train": ("wide",), "environment": ("fast",), "reward": ("fast",)}


class Stages:
    """What the hosts ran, by title: the place of Prefect's task runs."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.results: dict[str, Any] = {}
        self.begun, self.over = asyncio.Event(), asyncio.Event()

    async def run(self, title: str, body: Callable[[], Awaitable[Any]]) -> Any:
        self.running.add(title)
        self.begun.set()
        try:
            self.results[title] = await body()
            return self.results[title]
        finally:
            self.running.discard(title)
            self.over.set()


class Campaign:
    def __init__(self) -> None:
        self.rendezvous = Rendezvous({"fast", "wide"}, TOKEN)
        self.stages = {"fast": Stages(), "wide": Stages()}
        self.hosts: dict[str, asyncio.Task[None]] = {}
        self.launcher = PoolLauncher({}, {}, {})

    async def start_echo(self, pool: str, folder: Path, name: str = "echo", **more: Any) -> HostedService:
        settings = {"token": TOKEN}
        return await self.launcher.start(pool, name, ECHO, settings, folder / f"{name}.log", **more)


@asynccontextmanager
async def campaign_with_hosts(environment: dict[str, str] | None = None) -> AsyncIterator[Campaign]:
    campaign = Campaign()
    url = await campaign.rendezvous.start("127.0.0.1")
    for pool, stages in campaign.stages.items():
        host = PoolHost(Ticket(url=url, token=TOKEN, pool=pool), stages.run, ("tests.",))
        campaign.hosts[pool] = asyncio.create_task(host.serve({"flow_run_name": f"{pool}-host"}))
    async with asyncio.timeout(20):
        await campaign.rendezvous.complete()
    campaign.launcher = PoolLauncher(campaign.rendezvous.hosts, ROLES, environment or {})
    try:
        yield campaign
    finally:
        await campaign.rendezvous.stop()
        for host in campaign.hosts.values():
            host.cancel()
        await asyncio.gather(*campaign.hosts.values(), return_exceptions=True)


async def test_a_service_starts_on_a_host_with_the_runs_environment_and_ends_with_the_run(
    tmp_path: Path,
) -> None:
    async with campaign_with_hosts({"ECHO_VARIABLE": "lent"}) as campaign:
        echo = await campaign.start_echo("wide", tmp_path)
        assert echo.ready["variable"] == "lent"
        assert await echo.call("echo", [1, "two"]) == [1, "two"]
        process = psutil.Process(echo.ready["pid"])
        await campaign.rendezvous.stop()
        async with asyncio.timeout(30):
            await asyncio.gather(*campaign.hosts.values())  # at its end, without an error
    assert not process.is_running()


async def test_a_stage_runs_under_its_title_on_the_services_host_alone(tmp_path: Path) -> None:
    async with campaign_with_hosts() as campaign:
        echo = await campaign.start_echo("wide", tmp_path)
        assert await echo.call("echo", "weights", stage="train 3") == "weights"
        assert campaign.stages["wide"].results == {"train 3": "weights"}
        assert campaign.stages["fast"].results == {}
        (seconds,) = campaign.rendezvous.hosts["wide"].dispatch_seconds
        assert 0 <= seconds < 5


async def test_an_attended_stage_lasts_as_long_as_it_is_open_on_every_pool_of_its_role() -> None:
    async with campaign_with_hosts() as campaign:
        async with campaign.launcher.attend("rollout", 7) as attendance:
            async with asyncio.timeout(10):
                await asyncio.gather(*(stages.begun.wait() for stages in campaign.stages.values()))
            assert all(stages.running == {"rollout 7"} for stages in campaign.stages.values())
            attendance.summary["turns"] = 12
        for stages in campaign.stages.values():
            assert stages.running == set()
            assert stages.results == {"rollout 7": {"turns": 12}}


async def test_an_attended_stage_ends_when_what_it_waits_for_fails() -> None:
    async with campaign_with_hosts() as campaign:

        async def fail_meanwhile() -> None:
            async with campaign.launcher.attend("reward", 1):
                await campaign.stages["fast"].begun.wait()
                raise ValueError("no batch")

        with pytest.raises(ValueError, match="no batch"):
            await fail_meanwhile()
        async with asyncio.timeout(10):
            await campaign.stages["fast"].over.wait()
        assert campaign.stages["fast"].results == {}


async def test_hosts_end_with_a_campaign_that_is_gone_without_a_word(tmp_path: Path) -> None:
    async with campaign_with_hosts() as campaign:
        echo = await campaign.start_echo("fast", tmp_path)
        process = psutil.Process(echo.ready["pid"])
        for connection in list(campaign.rendezvous._server.connections):
            await connection.close()
        async with asyncio.timeout(30):
            ended = await asyncio.gather(*campaign.hosts.values(), return_exceptions=True)
        assert [type(problem) for problem in ended] == [CampaignGone, CampaignGone]
        assert not process.is_running()


async def test_a_lost_host_is_one_error_that_names_its_pool_and_flow_run(tmp_path: Path) -> None:
    async with campaign_with_hosts() as campaign:
        echo = await campaign.start_echo("wide", tmp_path)
        watch = asyncio.create_task(campaign.launcher.first_lost())
        await asyncio.sleep(0)
        campaign.hosts["wide"].cancel()
        async with asyncio.timeout(30):
            problem = await watch
        assert "'wide'" in str(problem)
        assert "wide-host" in str(problem)
        with pytest.raises(HostLost):
            await echo.call("echo", 1, stage="train 0")
        await echo.stop()  # it has ended with its host


async def test_a_ticket_to_nobody_ends_the_host() -> None:
    ticket = Ticket(url="http://127.0.0.1:9", token=TOKEN, pool="fast")
    with pytest.raises(CampaignGone):
        await PoolHost(ticket, Stages().run).serve({})


async def test_the_token_opens_hosts_and_rendezvous_and_nothing_else_does() -> None:
    async with campaign_with_hosts() as campaign:
        for url in (
            campaign.rendezvous.hosts["fast"].client.url,
            campaign.rendezvous.hosts["wide"].client.url,
        ):
            for token in (None, "guessed"):
                with pytest.raises(ConnectionLost):
                    await RpcClient(url, token=token).connect()


async def test_only_services_of_the_project_start_and_each_name_once(tmp_path: Path) -> None:
    async with campaign_with_hosts() as campaign:
        with pytest.raises(ServiceFailed, match=r"http\.server is no service"):
            await campaign.launcher.start("fast", "web", "http.server", {}, tmp_path / "web.log")
        await campaign.start_echo("fast", tmp_path)
        with pytest.raises(ServiceFailed, match="runs here already"):
            await campaign.start_echo("fast", tmp_path)


async def test_a_second_host_of_a_pool_is_refused() -> None:
    async with campaign_with_hosts() as campaign:
        with pytest.raises(RpcError, match="no host of pool 'fast' is awaited"):
            await campaign.rendezvous._register({"pool": "fast", "url": ""}, None)  # type: ignore[arg-type]
