import asyncio

import pytest

from infra.clock import now
from infra.virtual_time import run_virtual
from tasks.simulation.cores import ProcessClock, SharedCores


@pytest.mark.parametrize(
    ("cores", "busy", "pace"),
    [(2, 1, 1.0), (2, 2, 0.6), (2, 3, 0.4), (4, 2, 1 - 0.4 / 3), (4, 4, 0.6), (4, 8, 0.3), (1, 2, 0.3)],
)
def test_cores_that_are_all_at_work_are_slower_than_one_alone(cores: int, busy: int, pace: float) -> None:
    async def scenario() -> float:
        shared = SharedCores(cores, pace_when_full=0.6)
        for process in [shared.process() for _ in range(busy)]:
            process.call_at(1e9, lambda: None)
        return shared.pace

    assert run_virtual(scenario()) == pytest.approx(pace)


async def _computes(process: ProcessClock, seconds: float, begins: float = 0.0) -> float:
    await asyncio.sleep(begins)
    await process.sleep(seconds)
    return now()


def test_as_many_as_there_are_cores_do_not_slow_down() -> None:
    async def scenario() -> list[float]:
        cores = SharedCores(2)
        return await asyncio.gather(*(_computes(cores.process(), seconds) for seconds in (3, 5)))

    assert run_virtual(scenario()) == [3, 5]


def test_more_than_the_cores_share_them_until_one_is_done() -> None:
    async def scenario() -> list[float]:
        cores = SharedCores(2)
        return await asyncio.gather(*(_computes(cores.process(), seconds) for seconds in (4, 6, 8)))

    # At 2/3 each the first is done at 6 s, when 2 s and 4 s of the others are left.
    assert run_virtual(scenario()) == pytest.approx([6, 8, 10])


def test_one_that_comes_later_slows_the_others_from_then_on() -> None:
    async def scenario() -> list[float]:
        cores = SharedCores(1)
        first, second = cores.process(), cores.process()
        return await asyncio.gather(_computes(first, 4), _computes(second, 1, begins=2))

    # The first has 2 s left at 2 s; the second needs 2 s at half the pace; then 1 s is left.
    assert run_virtual(scenario()) == pytest.approx([5, 4])


def test_a_process_does_one_thing_at_a_time() -> None:
    async def worked(process: ProcessClock) -> float:
        await process.work(2)
        return now()

    async def scenario() -> list[float]:
        process = SharedCores(2).process()
        return await asyncio.gather(worked(process), worked(process), worked(process))

    assert run_virtual(scenario()) == [2, 4, 6]


def test_timers_of_its_own_time_ring_when_that_has_passed() -> None:
    async def scenario() -> list[float]:
        cores = SharedCores(1)
        clock, other = cores.process(), cores.process()
        rung: list[float] = []

        def again() -> None:
            rung.append(now())
            if len(rung) < 3:
                clock.call_at(clock.now() + 1, again)

        clock.call_at(clock.now() + 1, again)
        dropped = clock.call_at(clock.now() + 0.5, lambda: rung.append(-1))
        dropped.cancel()
        await _computes(other, 1)
        await asyncio.sleep(10)
        assert cores.pace == 1
        assert clock.now() < now()  # it was slowed
        return rung

    assert run_virtual(scenario()) == pytest.approx([2, 3, 4])


def test_one_that_gives_up_leaves_the_cores_to_the_others() -> None:
    async def scenario() -> list[float]:
        cores = SharedCores(1)
        staying = asyncio.create_task(_computes(cores.process(), 4))
        leaving = asyncio.create_task(_computes(cores.process(), 100))
        await asyncio.sleep(2)
        leaving.cancel()
        return [await staying]

    assert run_virtual(scenario()) == pytest.approx([5])
