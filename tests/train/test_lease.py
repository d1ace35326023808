"""One trainer at a time: who may take a run over, when, and that the one overtaken learns of it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.object_store import Data, ObjectStore
from tasks.train.lease import (
    Acquire,
    Claim,
    EpochRecord,
    Heartbeat,
    Holder,
    LeaseLost,
    LeaseRefused,
    Liveness,
    Refuse,
    Standing,
    TrainerLease,
    Wait,
    probe,
    this_process,
)

ELSEWHERE = Holder(host="another-node", pid=7, started=0.0)


def standing(
    liveness: Liveness, *, count: int = 5, at: float = 100.0, released: bool = False, epoch: int = 3
) -> Standing:
    record = EpochRecord(epoch=epoch, holder=ELSEWHERE, claim="c", ttl_s=30.0, acquired_at=40.0)
    return Standing(record, Heartbeat(count=count, at=at, released=released), liveness)


def test_the_first_epoch_of_a_run_is_one() -> None:
    assert Claim().decide(None, 0.0) == Acquire(1)


def test_a_dead_or_finished_holder_is_followed_at_once() -> None:
    assert Claim().decide(standing(Liveness.DEAD), 100.1) == Acquire(4)
    for liveness in Liveness:
        assert Claim().decide(standing(liveness, released=True), 100.1) == Acquire(4)


def test_a_holder_that_lives_here_is_respected_until_its_heartbeat_is_stale() -> None:
    decision = Claim().decide(standing(Liveness.ALIVE), 129.0)
    assert isinstance(decision, Refuse)
    assert "process 7 on another-node" in decision.message
    assert Claim().decide(standing(Liveness.ALIVE), 130.0) == Acquire(4)  # it hangs; the fence stops it


def test_where_life_cannot_be_told_the_ttl_decides() -> None:
    claim = Claim()
    assert claim.decide(standing(Liveness.UNKNOWN), 110.0) == Wait(20.0)
    assert claim.decide(standing(Liveness.UNKNOWN), 129.5) == Wait(0.5)
    assert claim.decide(standing(Liveness.UNKNOWN), 130.0) == Acquire(4)


def test_a_heartbeat_that_moves_while_watched_is_life() -> None:
    claim = Claim()
    assert claim.decide(standing(Liveness.UNKNOWN), 110.0) == Wait(20.0)
    assert isinstance(claim.decide(standing(Liveness.UNKNOWN, count=6, at=115.0), 116.0), Refuse)


def test_a_holder_whose_clock_is_ahead_is_waited_for_one_ttl_only() -> None:
    claim = Claim()
    assert claim.decide(standing(Liveness.UNKNOWN, at=5000.0), 110.0) == Wait(30.0)
    assert claim.decide(standing(Liveness.UNKNOWN, at=5000.0), 140.0) == Acquire(4)


def test_another_claimant_that_was_faster_is_watched_anew() -> None:
    claim = Claim()
    claim.decide(standing(Liveness.UNKNOWN), 110.0)
    assert claim.decide(standing(Liveness.UNKNOWN, epoch=4, count=0, at=125.0), 126.0) == Wait(29.0)


def test_a_holder_that_died_before_its_first_heartbeat_counts_from_its_record() -> None:
    record = EpochRecord(epoch=3, holder=ELSEWHERE, claim="c", ttl_s=30.0, acquired_at=40.0)
    assert Claim().decide(Standing(record, None, Liveness.UNKNOWN), 50.0) == Wait(20.0)
    assert Claim().decide(Standing(record, None, Liveness.UNKNOWN), 70.0) == Acquire(4)


@given(
    st.lists(st.tuples(st.floats(0, 20), st.booleans(), st.floats(-1e4, 1e4)), min_size=1, max_size=30),
    st.sampled_from([Liveness.ALIVE, Liveness.UNKNOWN]),
)
def test_a_claim_ends_within_a_ttl_and_never_takes_over_from_a_heartbeat_seen_to_move(
    looks: list[tuple[float, bool, float]], liveness: Liveness
) -> None:
    """Whatever the skew of the holder's clock and the moments of looking."""
    claim, now, count = Claim(), 1000.0, 5
    moved, began = False, None
    for pause, beats, skew in looks:
        now += pause
        if beats and began is not None:
            count += 1
            moved = True
        began = now if began is None else began
        decision = claim.decide(standing(liveness, count=count, at=now + skew), now)
        if isinstance(decision, Wait):
            assert 0 < decision.seconds <= 30.0 + 1e-6
            assert now + decision.seconds <= began + 30.0 + 1e-6
        if moved:
            assert isinstance(decision, Refuse)
        if not isinstance(decision, Wait):
            return


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return ObjectStore(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}")


async def test_a_second_trainer_is_refused_while_the_first_lives(store: ObjectStore) -> None:
    first = await TrainerLease.acquire(store)
    with pytest.raises(LeaseRefused, match=f"process {os.getpid()} on .* stop it first"):
        await TrainerLease.acquire(store)
    first.check()
    first.release()
    second = await TrainerLease.acquire(store)
    assert (first.epoch, second.epoch) == (1, 2)


async def test_a_lease_on_another_host_is_taken_over_after_its_ttl_and_its_holder_told(
    store: ObjectStore,
) -> None:
    clock = Clock()
    first = await TrainerLease.acquire(store, clock, ttl_s=30.0, holder=ELSEWHERE)
    clock.now += 29.9
    first.renew()
    clock.now += 30.0
    first.check()
    second = await TrainerLease.acquire(store, clock)
    assert second.epoch == 2
    for effect in (first.check, first.renew):
        with pytest.raises(LeaseLost, match=r"epoch 2 after 1"):
            effect()
    second.check()


async def test_a_claimant_waits_out_the_ttl_of_a_silent_holder(store: ObjectStore) -> None:
    await TrainerLease.acquire(store, ttl_s=0.4, holder=ELSEWHERE)
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert (await TrainerLease.acquire(store, ttl_s=0.4)).epoch == 2
    assert 0.3 < loop.time() - began < 2.0


async def test_a_claimant_gives_up_when_the_holder_on_another_host_renews(store: ObjectStore) -> None:
    first = await TrainerLease.acquire(store, ttl_s=0.6, holder=ELSEWHERE)
    keeper = asyncio.create_task(first.keep())
    with pytest.raises(LeaseRefused):
        await TrainerLease.acquire(store, ttl_s=0.6)
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)


async def test_the_block_that_holds_a_lease_is_stopped_when_it_is_lost(store: ObjectStore) -> None:
    clock = Clock()
    usurpers: list[TrainerLease] = []
    after = False

    async def train() -> None:
        nonlocal after
        async with TrainerLease.held(store, clock, ttl_s=0.3):
            clock.now += 1.0
            usurpers.append(await TrainerLease.acquire(store, clock, ttl_s=0.3))
            await asyncio.sleep(20)
            after = True

    with pytest.raises(LeaseLost, match="epoch 2 after 1"):
        await train()
    assert not after
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    usurpers[0].check()


async def test_a_block_that_ends_or_fails_releases_the_lease(store: ObjectStore) -> None:
    async with TrainerLease.held(store):
        pass
    with pytest.raises(ZeroDivisionError):
        async with TrainerLease.held(store):
            raise ZeroDivisionError
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05), TrainerLease.held(store):
            await asyncio.sleep(20)
    async with TrainerLease.held(store) as lease:
        assert lease.epoch == 4


def heartbeat_count(store: ObjectStore, lease: TrainerLease) -> int:
    data = store.get(f"lease/heartbeats/{lease.epoch:08d}.json")
    return Heartbeat.model_validate_json(data).count


class Unreachable(ObjectStore):
    """A store whose server is gone from some moment on."""

    gone = False

    def __init__(self, url: str):
        super().__init__(url)
        self._loop = asyncio.get_running_loop()
        self.written = asyncio.Event()
        """Set by a write after the server has come back."""

    def put(self, key: str, data: Data, *, durable: bool = False) -> None:
        if self.gone:
            self._loop.call_soon_threadsafe(self.written.clear)
            raise ConnectionError("nobody listens")
        super().put(key, data, durable=durable)
        self._loop.call_soon_threadsafe(self.written.set)


async def test_a_store_that_is_gone_for_a_while_does_not_cost_the_lease(tmp_path: Path) -> None:
    store = Unreachable(str(tmp_path))
    async with TrainerLease.held(store, ttl_s=0.15) as lease:
        store.gone = True
        await asyncio.sleep(0.2)
        store.written.clear()
        store.gone = False
        lost = heartbeat_count(store, lease)
        await asyncio.wait_for(store.written.wait(), 20)
        assert heartbeat_count(store, lease) > lost


async def test_a_lease_whose_store_is_gone_ends_its_block_without_a_second_error(tmp_path: Path) -> None:
    store = Unreachable(str(tmp_path))

    async def train() -> None:
        async with TrainerLease.held(store):
            store.gone = True
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await train()


async def test_of_concurrent_claimants_one_gets_each_epoch(store: ObjectStore) -> None:
    def claim(_: int) -> int | None:
        try:
            return asyncio.run(TrainerLease.acquire(store)).epoch
        except LeaseRefused:
            return None

    with ThreadPoolExecutor(8) as pool:
        loop = asyncio.get_running_loop()
        got = await asyncio.gather(*(loop.run_in_executor(pool, claim, index) for index in range(8)))
    assert [epoch for epoch in got if epoch is not None] == [1]


def test_a_process_is_told_from_a_later_one_with_its_pid() -> None:
    me = this_process()
    assert probe(me) is Liveness.ALIVE
    assert probe(me.model_copy(update={"started": me.started - 60})) is Liveness.DEAD
    assert probe(me.model_copy(update={"host": "another-node"})) is Liveness.UNKNOWN
    child = subprocess.Popen(["sleep", "60"])
    holder = me.model_copy(update={"pid": child.pid})
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
    assert probe(holder.model_copy(update={"started": this_process().started})) is Liveness.DEAD
    child.wait()
    assert probe(holder) is Liveness.DEAD


async def test_a_killed_trainers_run_is_taken_over_at_once(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from infra.object_store import ObjectStore\n"
        "from tasks.train.lease import TrainerLease\n"
        "async def main():\n"
        "    async with TrainerLease.held(ObjectStore(sys.argv[1])) as lease:\n"
        "        print(lease.epoch, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    store = ObjectStore(str(tmp_path))
    trainer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path), stdout=asyncio.subprocess.PIPE, cwd=os.getcwd()
    )
    assert trainer.stdout is not None
    assert await trainer.stdout.readline() == b"1\n"
    with pytest.raises(LeaseRefused, match=f"process {trainer.pid} "):
        await TrainerLease.acquire(store)
    trainer.kill()
    await trainer.wait()
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert (await TrainerLease.acquire(store)).epoch == 2
    assert loop.time() - began < 1.0
