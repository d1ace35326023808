"""The order of the protocol's stages: in modes that overlap training with rollout, and in the others."""

import asyncio
from typing import Any, cast

import pytest

from infra.virtual_time import run_virtual
from tasks.session import Session
from tasks.train.config import TrainConfig
from tasks.train.loop import directly, train_loop
from tasks.train.modes import ModeName

TRAIN_S, COLLECT_S = 10.0, 4.0


class Record:
    """What a session is asked for, in order; its stages take their time and do nothing."""

    def __init__(self, mode: ModeName, steps: int, first: int = 0):
        alpha = 0 if mode in ("sync", "sync_plus") else 1
        self.train = TrainConfig(mode=mode, alpha=alpha, steps=steps)
        self.campaign = self
        self.step = first
        self.log: list[str] = []
        self.background: list[asyncio.Future[Any]] = []

    async def begin(self) -> None:
        self.log.append("begin")

    async def pushed(self) -> None:
        self.log.append(f"pushed {self.step}")

    def in_background(self, work: asyncio.Future[Any]) -> None:
        self.background.append(work)

    async def _stage(self, name: str, step: int, seconds: float = 0.0) -> None:
        self.log.append(f"{name} {step}")
        await asyncio.sleep(seconds)

    async def get_batch(self, step: int) -> int:
        await self._stage("get_batch", step, COLLECT_S)
        return step

    async def suspend(self, step: int) -> None:
        await self._stage("suspend", step)

    async def update(self, step: int) -> None:
        await self._stage("update", step)

    async def resume(self, step: int) -> None:
        await self._stage("resume", step)

    async def recompute(self, step: int) -> None:
        await self._stage("recompute", step)

    async def train_step(self, batch: int) -> None:
        await self._stage("train_step", batch, TRAIN_S)
        self.step = batch + 1


def performed(record: Record) -> tuple[list[str], float]:
    """The stages in order, and the seconds they took together."""
    session = cast(Session, record)

    async def main() -> float:
        await train_loop(session, directly(session))
        return asyncio.get_running_loop().time()

    seconds = run_virtual(main())
    return record.log, seconds


@pytest.mark.parametrize("mode", ["one_off", "areal", "tutti"])
def test_overlapping_modes_take_the_weights_of_the_step_before_when_the_next_batch_is_there(
    mode: ModeName,
) -> None:
    record = Record(mode, steps=2)
    log, seconds = performed(record)
    assert log == [
        *("begin", "get_batch 0", "pushed 0", "suspend 0", "update 0", "resume 0"),
        *("get_batch 1", "recompute 0", "train_step 0"),  # begun at one instant
        *("pushed 1", "suspend 1", "update 1", "resume 1"),  # once step 0 is trained
        *("recompute 1", "train_step 1"),
        *("pushed 2", "suspend 2", "update 2", "resume 2"),
    ]
    assert seconds == COLLECT_S + TRAIN_S + TRAIN_S  # the second batch is collected while the first trains
    assert [work.done() for work in record.background] == [True, True]


@pytest.mark.parametrize("mode", ["sync", "sync_plus"])
def test_the_other_modes_take_every_version_before_the_next_batch(mode: ModeName) -> None:
    log, seconds = performed(Record(mode, steps=2))
    assert log == [
        *("begin", "get_batch 0", "train_step 0", "pushed 1", "suspend 0", "update 0", "resume 0"),
        *("recompute 0", "get_batch 1", "train_step 1", "pushed 2", "suspend 1", "update 1", "resume 1"),
        "recompute 1",
    ]
    assert seconds == 2 * (COLLECT_S + TRAIN_S)


@pytest.mark.parametrize("mode", ["sync", "tutti"])
def test_a_resumed_run_goes_on_from_its_step_and_a_finished_one_does_nothing(mode: ModeName) -> None:
    log, _ = performed(Record(mode, steps=3, first=2))
    assert log[1] == "get_batch 2"
    assert sum(line.startswith("train_step") for line in log) == 1
    assert performed(Record(mode, steps=2, first=2))[0] == ["begin"]
