"""What becomes of a body of work when a part that it leans on is lost, on real tasks of an event loop."""

import asyncio
import threading
from pathlib import Path

import pytest

from infra.launcher import LocalService
from infra.processes import ServiceProcess
from tasks.campaign import SupervisionConfig
from tasks.supervision import Part, PartLost, Supervisor, lost_part, service_part, store_part

FAST = SupervisionConfig(every_s=0.05, silence_limit_s=0.15)


async def never() -> str:
    await asyncio.Event().wait()
    return ""


async def alive() -> None: ...


async def waiting_body(supervisor: Supervisor, *parts: Part) -> None:
    async with supervisor.attending(), supervisor.explaining():
        for part in parts:
            supervisor.watch(part)
        async with asyncio.timeout(20):
            await asyncio.Event().wait()


async def test_a_body_that_waits_ends_with_the_part_that_ended() -> None:
    supervisor = Supervisor(FAST)
    supervisor.advice = "Start it again."

    async def ended() -> str:
        return "its process ended with status -9"

    part = Part("the trainer", ended=ended, log=Path("logs/trainer.log"))
    with pytest.raises(PartLost) as caught:
        await waiting_body(supervisor, part, Part("the proxy", ended=never, sign=alive))
    assert str(caught.value) == (
        "the trainer is lost: its process ended with status -9; its log is logs/trainer.log\nStart it again."
    )
    assert caught.value.__suppress_context__
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_body_that_waits_again_on_its_way_out_is_cancelled_again() -> None:
    supervisor = Supervisor(FAST, insist_every_s=0.05)
    tries = 0

    async def stubborn() -> None:
        nonlocal tries
        async with supervisor.attending():
            supervisor.watch(Part("the Prefect server", sign=never))
            async with asyncio.timeout(20):
                while tries < 3:
                    try:
                        await asyncio.Event().wait()
                    except asyncio.CancelledError:
                        tries += 1
                raise asyncio.CancelledError

    with pytest.raises(PartLost, match="the Prefect server is lost"):
        await stubborn()
    task = asyncio.current_task()
    assert task is not None
    assert (tries, task.cancelling()) == (3, 0)


async def test_a_part_that_hangs_is_lost_after_its_limit_and_the_message_names_the_option() -> None:
    with pytest.raises(PartLost, match=r"the proxy is lost: it does not answer for 0.15 s .*silence_limit_s"):
        await waiting_body(Supervisor(FAST), Part("the proxy", sign=never))


async def test_a_part_that_answers_now_and_then_is_kept() -> None:
    supervisor = Supervisor(FAST)
    tries, enough = 0, asyncio.Event()

    async def sign() -> None:
        nonlocal tries
        tries += 1
        if tries == 9:
            enough.set()
        if tries % 3:
            raise ConnectionError("refused")

    async with supervisor.attending():
        supervisor.watch(Part("the store", sign=sign))
        await enough.wait()
    assert supervisor.lost is None


async def test_an_error_that_a_lost_part_explains_becomes_the_one_error() -> None:
    supervisor = Supervisor(SupervisionConfig(every_s=5, silence_limit_s=60))

    async def refused() -> None:
        raise ConnectionRefusedError("nobody listens")

    signs = 0

    async def first_well_then_refused() -> None:
        nonlocal signs
        signs += 1
        if signs > 1:
            await refused()

    async def body() -> None:
        async with supervisor.attending(), supervisor.explaining():
            supervisor.watch(Part("the store", sign=first_well_then_refused))
            await asyncio.sleep(0)
            raise RuntimeError("some consequence")

    with pytest.raises(PartLost, match="the store is lost: ConnectionRefusedError: nobody listens"):
        await body()


async def test_an_error_of_the_bodys_own_stays_what_it_is() -> None:
    supervisor = Supervisor(FAST)

    async def body() -> None:
        async with supervisor.attending(), supervisor.explaining():
            supervisor.watch(Part("the trainer", ended=never, sign=alive))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await body()


async def test_a_cancellation_from_outside_stays_one() -> None:
    work = asyncio.create_task(waiting_body(Supervisor(FAST), Part("the trainer", ended=never)))
    await asyncio.sleep(0.05)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_errors_of_taking_the_rest_down_do_not_hide_the_lost_part() -> None:
    supervisor = Supervisor(FAST)

    async def ended() -> str:
        return "gone"

    async def body() -> None:
        async with supervisor.attending():
            try:
                async with supervisor.explaining():
                    supervisor.watch(Part("the trainer", ended=ended))
                    await asyncio.Event().wait()
            finally:
                raise OSError("the store is gone too")

    with pytest.raises(PartLost, match="the trainer"):
        await body()


async def test_parts_taken_down_on_purpose_are_not_lost() -> None:
    supervisor = Supervisor(FAST)
    down = asyncio.Event()

    async def ended() -> str:
        await down.wait()
        return "stopped"

    async with supervisor.attending():
        supervisor.watch(Part("the trainer", ended=ended))
        await asyncio.sleep(0)
        supervisor.release()
        down.set()
        await asyncio.sleep(0.05)
    assert supervisor.lost is None


async def test_a_store_that_hangs_is_asked_by_one_thread_and_ends_the_body() -> None:
    release, calls = threading.Event(), []

    def reach() -> None:
        calls.append(threading.current_thread())
        release.wait(20)

    try:
        with pytest.raises(PartLost, match=r"sample buffer \(s3://bucket\) is lost"):
            await waiting_body(Supervisor(FAST), store_part("sample buffer", "s3://bucket", reach))
        assert len(calls) == 1
        assert calls[0].daemon
    finally:
        release.set()


async def test_a_service_process_that_is_killed_is_lost(tmp_path: Path) -> None:
    process = await ServiceProcess.start(
        "served", "tests.infra.services", {"say": "hello"}, tmp_path / "served.log"
    )
    service = LocalService(process, None)
    part = Part("served", ended=service.ended)
    asyncio.get_running_loop().call_later(0.1, process.kill)
    try:
        with pytest.raises(PartLost, match="ended with status -9"):
            await waiting_body(Supervisor(FAST), part)
    finally:
        await service.stop()
    assert service_part("served", service).name == "served"


def test_a_lost_part_is_found_behind_the_error_that_hid_it() -> None:
    def hidden() -> None:
        try:
            raise PartLost("the Prefect server", "it does not answer")
        except PartLost:
            raise ConnectionError("no state was set")  # noqa: B904, as whoever reports the end does

    with pytest.raises(ConnectionError) as caught:
        hidden()
    lost = lost_part(caught.value)
    assert lost is not None
    assert lost.part == "the Prefect server"
    assert lost_part(ValueError("another")) is None
