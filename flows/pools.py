"""A campaign's work pools: whether they can serve it, and their hosts for as long as it runs."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

from prefect.blocks.system import Secret
from prefect.client.orchestration import PrefectClient, get_client
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from pydantic import SecretStr

from infra.launcher import Launcher, LocalLauncher, Role
from infra.pools.host import Ticket, reachable_address
from infra.pools.launcher import HostLost, PoolLauncher, Rendezvous
from infra.resources import NoCompatiblePool
from tasks.bindings import BindingsFile
from tasks.campaign import Campaign, PoolsConfig
from tasks.rollout.affinity import bind_roles
from tasks.run_folder import RunFolder


class PoolUnavailable(RuntimeError):
    """A work pool that the campaign names cannot serve it. The message names the option and the command."""


async def check_pools(campaign: Campaign) -> None:
    """Raises `PoolUnavailable` unless each of the campaign's pools, or a compatible one in its place, has an
    online worker and its host's deployment."""
    if campaign.pools is not None:
        await bound_pools(campaign)


async def bound_pools(campaign: Campaign, file: BindingsFile | None = None) -> PoolsConfig:
    """The campaign's pools, with compatible ones for those that cannot serve it. Raises `PoolUnavailable`.

    `file` is that of a run, whose bindings are kept and saved.
    """
    pools = campaign.pools
    assert pools is not None
    problems: dict[str, PoolUnavailable] = {}
    spare = {pool: f"pools.hardware.{pool}" for pool in pools.hardware}
    async with get_client() as client:
        for pool, option in {**spare, **pools.names}.items():
            try:
                await _check_pool(client, option, pool, pools.queue)
            except PoolUnavailable as problem:
                problems[pool] = problem
    try:
        available = {pool: pool not in problems for pool in [*spare, *pools.names]}
        return bind_roles(campaign, available, file)
    except NoCompatiblePool as error:
        first = next(problem for pool, problem in problems.items() if pool in pools.names)
        raise PoolUnavailable(f"{first}\n{error}") from None


async def _check_pool(client: PrefectClient, option: str, pool: str, queue: str) -> None:
    try:
        await client.read_work_pool(pool)
    except ObjectNotFound:
        raise PoolUnavailable(
            f"{option}: Prefect has no work pool {pool!r}: `make up` makes those of one machine, "
            f"`prefect work-pool create {pool} --type process` makes this one"
        ) from None
    workers = await client.read_workers_for_work_pool(pool)
    if not any(worker.status == "ONLINE" for worker in workers):
        raise PoolUnavailable(
            f"{option}: no worker of work pool {pool!r} is online: `prefect worker start --pool {pool}`"
        )
    queues = await client.read_work_queues(work_pool_name=pool)
    if queue not in {found.name for found in queues}:
        raise PoolUnavailable(
            f"pools.queue: work pool {pool!r} has no queue {queue!r}: "
            f"`prefect work-queue create {queue} --pool {pool}`"
        )
    try:
        deployment = await client.read_deployment_by_name(f"pool-host/{pool}")
    except ObjectNotFound:
        raise PoolUnavailable(
            f"{option}: there is no deployment pool-host/{pool}: `prefect --no-prompt deploy --all`"
        ) from None
    if deployment.work_pool_name != pool:
        raise PoolUnavailable(
            f"{option}: the deployment pool-host/{pool} is on work pool {deployment.work_pool_name!r}: "
            "`prefect --no-prompt deploy --all`"
        )


@asynccontextmanager
async def launcher_of(campaign: Campaign, run: str) -> AsyncIterator[Launcher]:
    """What starts the run's services: this machine, or hosts on the campaign's pools, which end with it."""
    if campaign.pools is None:
        yield LocalLauncher(tuple(campaign.affinity.local_pools))
        return
    file = BindingsFile(RunFolder.of(campaign, run).root)
    async with pool_launcher(await bound_pools(campaign, file), run) as launcher:
        yield launcher


@asynccontextmanager
async def pool_launcher(pools: PoolsConfig, run: str) -> AsyncIterator[PoolLauncher]:
    """A host on every pool, for as long as the body runs.

    Raises `PoolUnavailable` when a host does not report in time, and `HostLost` in the place of the body's
    cancellation when one is gone before its end.
    """
    token = secrets.token_urlsafe(32)
    rendezvous = Rendezvous(set(pools.names), token)
    address = reachable_address(_prefect_url()) if pools.address == "auto" else pools.address
    url = await rendezvous.start(address)
    tickets = {pool: f"tutti-ticket-{uuid4().hex}" for pool in pools.names}
    try:
        for pool, name in tickets.items():  # one by one: SQLite takes one writer at a time
            await _ask_for_host(Ticket(url=url, token=token, pool=pool), name, pools.queue, run)
        try:
            async with asyncio.timeout(pools.start_limit_s):
                await rendezvous.complete()
        except TimeoutError:
            missing = ", ".join(sorted(rendezvous.missing))
            raise PoolUnavailable(
                f"no host of {missing} reported within pools.start_limit_s ({pools.start_limit_s} s): "
                f"look at the flow runs of pool-host with the tag {run!r} and at the pools' workers"
            ) from None
        roles: dict[Role, tuple[str, ...]] = {
            "rollout": pools.rollout,
            "prefill": pools.prefill or pools.rollout,
            "train": (pools.train,),
            "environment": (pools.environment,),
            "reward": (pools.reward,),
        }
        lent = {name: value for name, value in os.environ.items() if name.startswith("FSSPEC_")}
        launcher = PoolLauncher(rendezvous.hosts, roles, lent)
        async with _until_lost(launcher):
            yield launcher
    finally:
        await rendezvous.stop()
        await asyncio.gather(*(_tear_up(name) for name in tickets.values()))


@asynccontextmanager
async def _until_lost(launcher: PoolLauncher) -> AsyncIterator[None]:
    """Cancel the body when a host is gone, and raise `HostLost` in the cancellation's place."""
    body = asyncio.current_task()
    assert body is not None
    problem: HostLost | None = None

    async def watch() -> None:
        nonlocal problem
        problem = await launcher.first_lost()
        body.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if problem is None:
            raise
        body.uncancel()
        raise problem from None
    finally:
        watching.cancel()


async def _ask_for_host(ticket: Ticket, name: str, queue: str, run: str) -> None:
    """Start the pool's host as a flow run below this one. Its token goes in a Secret block, read once."""
    await Secret(value=SecretStr(ticket.model_dump_json())).asave(name)
    await run_deployment(  # type: ignore[misc]
        f"pool-host/{ticket.pool}",
        parameters={"ticket": name, "run": run},
        flow_run_name=f"{ticket.pool} of {run}",
        timeout=0,
        tags=[run, ticket.pool],
        work_queue_name=queue,
    )


async def _tear_up(ticket: str) -> None:
    """Remove a ticket that its host did not use."""
    try:
        await Secret.adelete(ticket)
    except ValueError:
        return


def _prefect_url() -> str:
    return str(get_current_settings().api.url or "http://127.0.0.1:4200")
