"""A virtual clock: the order of things, the end of things, and what is not to be had there."""

import asyncio
import gc
import itertools
import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.blocking_calls import in_daemon_thread
from infra.clock import now, wall
from infra.virtual_time import StandStill, VirtualTimeLoop, run_virtual

YEAR_S = 365 * 86_400.0


def test_a_year_of_sleep_takes_no_time_and_is_on_the_clock() -> None:
    async def main() -> tuple[float, float, float]:
        began = now()
        await asyncio.sleep(YEAR_S)
        return began, now(), wall()

    started = time.monotonic()
    assert run_virtual(main()) == (0.0, YEAR_S, YEAR_S)
    assert time.monotonic() - started < 60


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0, 1.5, 7.0]), min_size=1, max_size=30))
def test_timers_fire_at_their_time_and_those_of_one_instant_in_the_order_they_were_set(
    delays: list[float],
) -> None:
    fired: list[tuple[float, int]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for index, delay in enumerate(delays):
            loop.call_later(delay, lambda index=index: fired.append((now(), index)))
        await asyncio.sleep(max(delays) + 1)

    run_virtual(main())
    assert fired == sorted((delay, index) for index, delay in enumerate(delays))


async def workers(seed: int, limits: list[float]) -> list[tuple[float, str]]:
    """Workers that take jobs from a queue, some of which time out: who did what when."""
    generator = random.Random(seed)
    queue: asyncio.Queue[int] = asyncio.Queue()
    seen: list[tuple[float, str]] = []

    async def work(name: int) -> None:
        while True:
            job = await queue.get()
            try:
                async with asyncio.timeout(limits[job % len(limits)]):
                    await asyncio.sleep(generator.expovariate(1.0))
                    seen.append((now(), f"{name} did {job}"))
            except TimeoutError:
                seen.append((now(), f"{name} gave {job} up"))
            queue.task_done()

    tasks = [asyncio.create_task(work(name)) for name in range(5)]
    for job in range(200):
        queue.put_nowait(job)
        await asyncio.sleep(generator.choice([0.0, 0.1]))
    await queue.join()
    for task in tasks:
        task.cancel()
    return seen


def test_the_same_program_does_the_same_at_the_same_times() -> None:
    first = run_virtual(workers(7, [0.5, 2.0]))
    assert first == run_virtual(workers(7, [0.5, 2.0]))
    assert first != run_virtual(workers(8, [0.5, 2.0]))
    assert {line.split()[1] for _, line in first} == {"did", "gave"}
    assert all(before[0] <= after[0] for before, after in itertools.pairwise(first))


def test_another_process_with_another_hash_seed_does_the_same() -> None:
    program = (
        "from infra.virtual_time import run_virtual; from tests.infra.test_virtual_time import workers;"
        "print(run_virtual(workers(7, [0.5, 2.0])))"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert answers == {f"{run_virtual(workers(7, [0.5, 2.0]))}\n"}


def test_a_queue_waits_as_long_as_theory_says() -> None:
    """M/D/1 at utilisation 1/2: by Pollaczek-Khinchine, the mean wait is rho / (2 (1 - rho)) services."""

    async def main() -> float:
        generator, server, waits = random.Random(0), asyncio.Lock(), []

        async def customer() -> None:
            came = now()
            async with server:
                waits.append(now() - came)
                await asyncio.sleep(1.0)

        async with asyncio.TaskGroup() as customers:
            for _ in range(20_000):
                await asyncio.sleep(generator.expovariate(0.5))
                customers.create_task(customer())
        return sum(waits) / len(waits)

    assert run_virtual(main()) == pytest.approx(0.5, rel=0.05)


def test_waiting_for_nobody_is_a_stand_still_that_names_who_waits() -> None:
    ended: list[str] = []

    async def for_an_event() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def main() -> None:
        await asyncio.sleep(3)
        await asyncio.create_task(for_an_event(), name="the one that waits")

    with pytest.raises(StandStill, match=r"at 3 s.*no timer is set(?s:.*)the one that waits: Event\.wait"):
        run_virtual(main())
    assert ended == ["cancelled"]


def test_beyond_the_horizon_heart_beats_do_not_hide_a_stand_still() -> None:
    beats: list[float] = []

    async def beat() -> None:
        while True:
            beats.append(now())
            await asyncio.sleep(10)

    async def main() -> None:
        beating = asyncio.create_task(beat())
        await asyncio.Event().wait()
        beating.cancel()

    with pytest.raises(StandStill, match="beyond 35 s"):
        run_virtual(main(), horizon_s=35)
    assert beats == [0, 10, 20, 30]


def test_what_main_leaves_behind_is_cancelled_and_may_take_its_virtual_time() -> None:
    ended: list[float] = []

    async def left() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(5)
            ended.append(now())

    async def main() -> str:
        main.left = asyncio.create_task(left())  # type: ignore[attr-defined]
        await asyncio.sleep(1)
        return "done"

    assert run_virtual(main(), horizon_s=2) == "done"
    assert ended == [6.0]


def test_what_main_raises_comes_out() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        run_virtual(main())


def test_blocking_calls_are_made_at_once_in_this_thread() -> None:
    async def main() -> list[Any]:
        loop, here = asyncio.get_running_loop(), threading.get_ident
        answers = [
            await asyncio.to_thread(here),
            await loop.run_in_executor(None, here),
            await in_daemon_thread(here),
            await asyncio.wait_for(asyncio.to_thread(sum, [1, 2]), 5),
        ]
        for call in (asyncio.to_thread(int, "x"), in_daemon_thread(lambda: int("x"))):
            with pytest.raises(ValueError, match="invalid literal"):
                await call
        assert now() == 0.0
        return answers

    assert run_virtual(main()) == [threading.get_ident()] * 3 + [3]


def test_cancelled_timers_neither_fire_nor_move_the_clock_nor_pile_up() -> None:
    fired: list[float] = []

    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        for _ in range(10_000):
            loop.call_later(1000, fired.append, 0.0).cancel()
        early = loop.call_later(5, fired.append, 5.0)
        loop.call_later(2, early.cancel)
        await asyncio.sleep(10)
        assert now() == 10.0
        return len(loop._timers)

    assert run_virtual(main()) < 1000
    assert fired == []


def test_an_error_in_a_callback_is_logged_and_the_rest_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> str:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)
        return "done"

    with caplog.at_level(logging.ERROR):
        assert run_virtual(main()) == "done"
    assert "ZeroDivisionError" in caplog.text


def test_sockets_and_processes_are_refused() -> None:
    async def connect() -> None:
        await asyncio.open_connection("127.0.0.1", 9)

    async def spawn() -> None:
        await asyncio.create_subprocess_exec(sys.executable)

    for main in (connect, spawn):
        with pytest.raises(NotImplementedError):
            run_virtual(main())


def test_generators_that_are_left_in_the_middle_are_closed() -> None:
    closed: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in itertools.count():
                yield number
        finally:
            await asyncio.sleep(1)
            closed.append("closed")

    async def main() -> None:
        async for _ in numbers():
            break
        gc.collect()
        await asyncio.sleep(2)
        assert closed == ["closed"]

    run_virtual(main())


def test_it_counts_what_it_runs() -> None:
    loop = VirtualTimeLoop()
    for delay in range(10):
        loop.call_later(delay, lambda: None)
    loop.call_later(100, loop.stop)
    loop.run_forever()
    assert (loop.events, loop.time()) == (11, 100.0)
    loop.close()
