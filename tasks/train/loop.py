"""The training loop: RollArt's six-step protocol, one for every mode, wherever its stages are performed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol

from tasks.session import Session
from tasks.train.modes import MODES

Stage = Literal["get_batch", "suspend", "update", "resume", "recompute", "train_step"]
"""The steps of the protocol: the methods of `Session` that perform them."""


class Call(Protocol):
    """Performs a stage with its arguments: as a task run, or as a plain call."""

    def __call__(self, stage: Stage, *arguments: Any) -> Awaitable[Any]: ...


def directly(session: Session) -> Call:
    """Stages as plain calls of the session's methods."""
    stages: dict[str, Callable[..., Awaitable[Any]]] = {
        "get_batch": session.get_batch,
        "suspend": session.suspend,
        "update": session.update,
        "resume": session.resume,
        "recompute": session.recompute,
        "train_step": lambda step, batch: session.train_step(batch),
    }
    return lambda stage, *arguments: stages[stage](*arguments)


async def train_loop(session: Session, call: Call) -> None:
    """Train until the campaign's last step. The same loop for every mode.

    Overlapping modes: the batch of step n is taken while step n - 1 trains; then the engines take version n
    and generate for step n + 1 while the trainer works on step n. Others: the engines take each new version
    before the next batch is begun.
    """
    overlaps = MODES[session.campaign.train.mode].overlaps_training
    training: asyncio.Future[Any] | None = None
    await session.begin()
    for step in range(session.step, session.campaign.train.steps):
        batch = await call("get_batch", step)
        if overlaps:
            if training is not None:
                await training
            await refresh(session, step, call)
            training = asyncio.gather(call("recompute", step), call("train_step", step, batch))
            session.in_background(training)
        else:
            await call("train_step", step, batch)
            await refresh(session, step, call)
            await call("recompute", step)
    if training is not None:
        await training
        await refresh(session, session.step, call)


async def refresh(session: Session, step: int, call: Call) -> None:
    """The engines take the newest weights once these are pushed: suspend, update, resume."""
    await session.pushed()
    await call("suspend", step)
    await call("update", step)
    await call("resume", step)
