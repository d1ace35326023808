"""A session with everything a person watches attached: progress line, TensorBoard, Prefect artifacts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import Any

from prefect.client.orchestration import get_client

from flows.pools import launcher_of
from tasks.bindings import BindingsFile
from tasks.campaign import Campaign
from tasks.open_session import open_session
from tasks.report.affinity_table import affinity_markdown
from tasks.report.artifacts import CampaignArtifacts
from tasks.report.progress import ProgressLine
from tasks.report.tensorboard import TensorBoardLog
from tasks.run_folder import RunFolder
from tasks.session import Session, surrounding_session
from tasks.supervision import Part, PartLost

PREFECT_SERVER = "the Prefect server"
unreported: ContextVar["asyncio.Future[PartLost]"] = ContextVar("unreported")
"""Resolved when a session has ended since the Prefect server is lost. Prefect itself goes on for minutes: it
tries to report the ends of flow runs to that server."""


def prefect_server() -> Part:
    """The server that this process reports to; without one of the user's, Prefect's temporary one."""

    async def sign() -> None:
        async with get_client() as client:
            problem = await client.api_healthcheck()
        if problem is not None:
            raise problem

    return Part(PREFECT_SERVER, sign=sign)


@asynccontextmanager
async def observed(campaign: Campaign, folder: RunFolder) -> AsyncIterator[Session]:
    """Open the run's session, or use the one that is open, with its observers."""
    surrounding = surrounding_session(folder)
    if surrounding is not None:
        yield surrounding
        return
    try:
        async with _session_with_observers(campaign, folder) as session:
            yield session
    except PartLost as lost:
        told = unreported.get(None)
        if lost.part == PREFECT_SERVER and told is not None and not told.done():
            told.set_result(lost)
        raise


@asynccontextmanager
async def _session_with_observers(campaign: Campaign, folder: RunFolder) -> AsyncIterator[Session]:
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(launcher_of(campaign, folder.name))
        session = await stack.enter_async_context(open_session(campaign, folder, launcher))
        session.supervisor.watch(prefect_server())
        progress = stack.enter_context(ProgressLine(campaign.train.steps))

        async def show(row: dict[str, Any]) -> None:
            progress.update(row)

        session.observers.append(show)
        if campaign.trackers.tensorboard:
            log = stack.enter_context(
                TensorBoardLog(session.files.tensorboard, resumed_step=session.step or None)
            )

            async def record(row: dict[str, Any]) -> None:
                log.write(row)

            session.observers.append(record)
        if campaign.trackers.prefect_artifacts:
            artifacts = CampaignArtifacts(campaign.name, campaign.train.steps)
            session.observers.append(artifacts.step)
            if campaign.affinity.profile != "off":
                bindings = BindingsFile(folder.root)

                async def advise(_: dict[str, Any]) -> None:
                    record = bindings.read()
                    if record.advice is not None:
                        await artifacts.affinity(affinity_markdown(record.advice, record.changes))

                session.observers.append(advise)
        yield session
        await session.observed()  # while what they write to is open
