import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.child_messages import frame, frames
from infra.child_pool import ChildPool
from infra.children import Child, ChildDied, ChildRaised, ChildTimeout

MODULE = "tests.infra.obedient_child"


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pid: int) -> bool:
    for _ in range(200):
        if not exists(pid):
            return True
        await asyncio.sleep(0.02)
    return False


async def start_pool(size: int, **options: object) -> ChildPool:
    pool = ChildPool(MODULE, {}, size, **options)  # type: ignore[arg-type]
    await pool.start()
    return pool


@given(
    st.lists(st.lists(st.integers(0, 2**40) | st.text() | st.binary() | st.none(), max_size=4), max_size=8),
    st.integers(1, 7),
)
def test_messages_survive_being_cut_anywhere(messages, chunk):
    stream = b"".join(map(frame, messages))
    buffer = bytearray()
    received = [
        message
        for start in range(0, len(stream), chunk)
        for message in frames(buffer, stream[start : start + chunk])
    ]
    assert received == messages
    assert not buffer


async def test_outstanding_calls_are_answered_each_with_its_own_result():
    child = await Child.start(MODULE, {})
    futures = [child.request("obey", ["echo", number]) for number in range(100)]
    assert child.outstanding == 100
    assert await asyncio.gather(*futures) == list(range(100))
    assert child.outstanding == 0
    await child.stop()


async def test_large_messages_pass_both_ways():
    child = await Child.start(MODULE, {})
    data = os.urandom(5_000_000)
    assert await child.request("obey", ["echo", data]) == data
    await child.stop()


async def test_what_a_child_prints_does_not_break_into_its_answers(capfd):
    child = await Child.start(MODULE, {})
    assert await child.request("obey", "print") == ""
    assert "xxx" in capfd.readouterr().err
    await child.stop()


async def test_an_exception_reaches_the_caller_and_the_child_goes_on():
    child = await Child.start(MODULE, {})
    with pytest.raises(ChildRaised, match="KeyError: 'told to raise'"):
        await child.request("obey", "raise")
    assert await child.request("obey", ["echo", 1]) == 1
    await child.stop()


async def test_a_time_out_is_told_and_leaves_killing_to_the_caller():
    child = await Child.start(MODULE, {})
    told = []
    with pytest.raises(ChildTimeout):
        await child.request("obey", "spin", 0.1, lambda: told.append(True))
    assert told == [True]
    assert exists(child.pid)
    pid = child.pid
    await child.stop()
    assert await gone(pid)


async def test_a_call_whose_caller_left_is_still_timed():
    child = await Child.start(MODULE, {})
    told = asyncio.Event()
    child.request("obey", "spin", 0.1, told.set).cancel()
    await asyncio.wait_for(told.wait(), 5)
    await child.stop()


async def test_death_ends_every_outstanding_call():
    child = await Child.start(MODULE, {})
    calls = [child.request("obey", order) for order in ("crash", ["echo", 1])]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [ChildDied, ChildDied]
    with pytest.raises(ChildDied):
        await child.request("obey", ["echo", 1])
    await child.stop()


async def test_a_child_that_ends_at_once_is_an_error_of_start():
    with pytest.raises(ChildDied):
        await Child.start(MODULE, {"refuse": True})


async def test_killing_takes_the_childs_own_processes_along():
    child = await Child.start(MODULE, {})
    grandchild = await child.request("obey", "grandchild")
    assert exists(grandchild)
    await child.stop()
    assert await gone(grandchild)


async def test_resource_limits_hold_in_the_child_only():
    child = await Child.start(MODULE, {}, limits={"AS": 1 << 30})
    assert await child.request("obey", "limit") == 1 << 30
    with pytest.raises(ChildRaised, match="MemoryError"):
        await child.request("obey", "allocate")
    assert await child.request("obey", ["echo", 1]) == 1
    await child.stop()


async def test_every_child_hashes_alike():
    children = [await Child.start(MODULE, {}) for _ in range(2)]
    hashes = [await child.request("obey", "hash") for child in children]
    assert hashes[0] == hashes[1]
    for child in children:
        await child.stop()


@pytest.mark.parametrize("busy", ["spin", "hold the interpreter lock", None])
async def test_a_child_ends_with_a_parent_that_is_killed(busy):
    program = (
        "import asyncio\n"
        "from infra.children import Child\n"
        "async def main():\n"
        f"    child = await Child.start({MODULE!r}, {{}})\n"
        f"    if {busy!r}: child.request('obey', {busy!r})\n"
        "    await asyncio.sleep(0.1)\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    assert exists(child)
    parent.kill()
    await parent.wait()
    assert await gone(child)


async def test_a_pool_spreads_calls_over_its_children():
    pool = await start_pool(2)
    began = time.monotonic()
    pids = await asyncio.gather(
        *(pool.call("obey", order, 5.0) for order in (["sleep", 0.3], ["sleep", 0.3]))
    )
    assert pids == [0.3, 0.3]
    assert time.monotonic() - began < 0.55
    await pool.close()


async def test_a_pool_keeps_its_size_after_five_hangs():
    pool = await start_pool(2)
    first = set(pool.pids)
    hung = await asyncio.gather(*(pool.call("obey", "spin", 0.2) for _ in range(5)), return_exceptions=True)
    assert [type(result) for result in hung] == [ChildTimeout] * 5
    assert await pool.call("obey", ["echo", "alive"], 5.0) == "alive"
    for _ in range(200):
        if len(pool.pids) == 2:
            break
        await asyncio.sleep(0.02)
    assert len(pool.pids) == 2
    assert not first & set(pool.pids)
    assert all([await gone(pid) for pid in first])
    await pool.close()


async def test_only_the_call_that_hangs_fails_those_behind_it_are_answered():
    pool = await start_pool(1)
    calls = [["echo", 0], "spin", ["echo", 1], ["echo", 2]]
    results = await asyncio.gather(*(pool.call("obey", call, 0.3) for call in calls), return_exceptions=True)
    assert isinstance(results[1], ChildTimeout)
    assert [results[0], *results[2:]] == [0, 1, 2]
    await pool.close()


async def test_only_the_call_that_crashes_fails_those_behind_it_are_answered():
    pool = await start_pool(1)
    calls = [["echo", 0], "crash", ["echo", 1]]
    results = await asyncio.gather(*(pool.call("obey", call, 5.0) for call in calls), return_exceptions=True)
    assert results[0] == 0
    assert isinstance(results[1], ChildDied)
    assert results[2] == 1
    await pool.close()


async def test_a_call_is_not_charged_for_those_before_it():
    pool = await start_pool(1)
    results = await asyncio.gather(*(pool.call("obey", ["sleep", 0.15], 0.4) for _ in range(6)))
    assert results == [0.15] * 6
    await pool.close()


async def test_handlers_run_where_signals_work():
    pool = await start_pool(1)
    assert await pool.call("obey", ["alarm", 0.05], 5.0) == "woken"
    await pool.close()


async def test_a_pool_whose_children_do_not_start_says_so():
    pool = ChildPool(MODULE, {"refuse": True}, 2)
    with pytest.raises(ChildDied):
        await pool.start()
    with pytest.raises(ChildDied):
        await asyncio.wait_for(pool.call("obey", ["echo", 1], 5.0), 20)
    await pool.close()


async def test_closing_a_pool_ends_children_and_calls():
    pool = await start_pool(1)
    pids = pool.pids
    waiting = asyncio.ensure_future(pool.call("obey", "spin", 60.0))
    behind = asyncio.ensure_future(pool.call("obey", ["echo", 1], 60.0))
    await asyncio.sleep(0.1)
    await pool.close()
    results = await asyncio.wait_for(asyncio.gather(waiting, behind, return_exceptions=True), 5)
    assert [type(result) for result in results] == [ChildDied, ChildDied]
    assert all([await gone(pid) for pid in pids])
