"""Rounds of turns: nobody begins before all have asked, nobody is answered before all are, nobody waits for
what is gone."""

import asyncio
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.rollout.lockstep import Lockstep, Moves, TurnRounds


def begun(moves: Moves) -> set[str]:
    return set(moves.begin)


def released(moves: Moves) -> set[str]:
    return set(moves.release)


def test_a_round_begins_once_all_have_asked_and_ends_once_all_are_answered() -> None:
    rounds = TurnRounds()
    rounds.expect(["a", "b"])
    assert begun(rounds.ask("a")) == set()
    assert begun(rounds.ask("b")) == {"a", "b"}
    assert released(rounds.answered("b")) == set()
    assert released(rounds.answered("a")) == {"a", "b"}


def test_who_asks_during_a_round_takes_part_in_the_next() -> None:
    rounds = TurnRounds()
    rounds.expect(["a"])
    assert begun(rounds.ask("a")) == {"a"}
    rounds.expect(["retry"])
    assert begun(rounds.ask("retry")) == set()
    assert released(rounds.answered("a")) == {"a"}
    assert begun(rounds.ask("a")) == {"a", "retry"}


@pytest.mark.parametrize("asked", [True, False])
def test_one_that_is_over_holds_up_no_round(asked: bool) -> None:
    rounds = TurnRounds()
    rounds.expect(["a", "b"])
    rounds.ask("a")
    if not asked:
        assert begun(rounds.over(["b"])) >= {"a"}
        return
    rounds.ask("b")
    rounds.answered("a")
    assert released(rounds.over(["b"])) >= {"a"}


def test_strangers_wait_for_nobody_and_nobody_for_them() -> None:
    rounds = TurnRounds()
    rounds.expect(["a"])
    assert begun(rounds.ask("evaluation")) == {"evaluation"}
    assert begun(rounds.ask("a")) == {"a"}
    assert released(rounds.answered("a")) == {"a"}
    assert released(rounds.answered("evaluation")) == {"evaluation"}


def test_episodes_are_over_together() -> None:
    rounds = TurnRounds()
    rounds.expect(["a", "b"])
    assert not rounds.over(["a"]).episodes_over
    assert rounds.over(["b"]).episodes_over


@given(seed=st.integers(0, 2**32), members=st.integers(1, 8), faults=st.floats(0, 0.3))
def test_under_any_order_of_events_rounds_are_whole_and_none_hangs(
    seed: int, members: int, faults: float
) -> None:
    """Trajectories of random lengths ask, are answered, give up waiting, ask anew, die, and are retried."""
    draw, rounds = random.Random(seed), TurnRounds()
    turns = {f"t{index}": draw.randrange(1, 6) for index in range(members)}
    state = dict.fromkeys(turns, "idle")  # idle, asking, playing, answered
    rounds.expect(turns)
    retries, steps = 0, 0

    def take(moves: Moves) -> None:
        begins = {name for name in moves.begin if state.get(name) == "asking"}
        if begins:
            assert begins == set(state), "a round begins without someone who is alive"
            assert not any(each in ("playing", "answered") for each in state.values())
        for name in begins:
            state[name] = "playing"
        for name in moves.release:
            if state.get(name) == "answered":
                assert "playing" not in state.values(), "an answer is given out before the last one is there"
                turns[name] -= 1
                state[name] = "idle"

    def over(name: str) -> None:
        del state[name]
        take(rounds.over([name]))

    while state:
        steps += 1
        assert steps < 5000
        movable = [name for name in state if state[name] in ("idle", "playing")]
        assert movable, f"everybody waits: {state}"
        name = draw.choice(movable)
        if draw.random() < faults:
            victim = draw.choice(sorted(state))
            over(victim)
            if retries < 4:
                retries += 1
                retry = f"{victim}-again{retries}"
                turns[retry], state[retry] = draw.randrange(1, 4), "idle"
                rounds.expect([retry])
        elif state[name] == "playing":
            state[name] = "answered"
            take(rounds.answered(name))
        elif turns[name] <= 0:
            over(name)
        else:
            state[name] = "asking"
            take(rounds.ask(name))
            if state.get(name) == "asking" and draw.random() < faults:
                take(rounds.withdraw(name))
                state[name] = "idle"
    assert rounds.live == set()


class Turns:
    """Turns on a `Lockstep`, and the order in which they began and ended."""

    def __init__(self) -> None:
        self.lockstep = Lockstep()
        self.log: list[str] = []

    async def turn(self, name: str, generating: asyncio.Event | None = None) -> None:
        async with self.lockstep.turn(name):
            self.log.append(f"{name} begins")
            if generating is not None:
                await generating.wait()
        self.log.append(f"{name} has its answer")

    def start(self, name: str, generating: asyncio.Event | None = None) -> "asyncio.Task[None]":
        return asyncio.create_task(self.turn(name, generating))


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_turns_begin_together_and_answers_wait_for_the_slowest() -> None:
    turns, slow = Turns(), asyncio.Event()
    turns.lockstep.expect(["a", "b"])
    tasks = [turns.start("a")]
    await settled()
    assert turns.log == []
    tasks.append(turns.start("b", slow))
    await settled()
    assert sorted(turns.log) == ["a begins", "b begins"]
    slow.set()
    await asyncio.gather(*tasks)
    assert sorted(turns.log[2:]) == ["a has its answer", "b has its answer"]


async def test_a_turn_that_fails_is_not_held_and_holds_nobody() -> None:
    turns = Turns()
    turns.lockstep.expect(["a", "b"])

    async def fails() -> None:
        async with turns.lockstep.turn("b"):
            raise ValueError("no worker")

    first, second = turns.start("a"), asyncio.create_task(fails())
    with pytest.raises(ValueError, match="no worker"):
        await second
    await first


@pytest.mark.parametrize("moment", ["waiting", "generating", "answered"])
async def test_whoever_goes_away_leaves_the_others_free_once_it_is_over(moment: str) -> None:
    turns, slow = Turns(), asyncio.Event()
    turns.lockstep.expect(["a", "b"] if moment != "waiting" else ["a", "b", "late"])
    leaver = turns.start("a", slow if moment == "generating" else None)
    stays = turns.start("b", slow if moment == "answered" else None)
    await settled()
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    turns.lockstep.over(["a"])
    slow.set()
    if moment == "waiting":
        late = turns.start("late")
        await asyncio.wait_for(late, 5)
    await asyncio.wait_for(stays, 5)


async def test_one_whose_caller_went_away_may_ask_again() -> None:
    turns = Turns()
    turns.lockstep.expect(["a", "b"])
    gone = turns.start("a")
    await settled()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    other = turns.start("b")
    await settled()
    assert turns.log == [], "the round began without a turn of a"
    await asyncio.wait_for(asyncio.gather(turns.start("a"), other), 5)


async def test_a_caller_cancelled_as_its_round_begins_holds_nobody() -> None:
    turns = Turns()
    turns.lockstep.expect(["a", "b"])
    gone = turns.start("a")
    await settled()
    other = turns.start("b")
    await asyncio.sleep(0)  # b has asked, so the round has begun, and a has not run since
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await asyncio.wait_for(other, 5)


async def test_an_aborted_waiter_goes_on_to_the_gate() -> None:
    turns = Turns()
    turns.lockstep.expect(["a", "b"])
    waiting = turns.start("a")
    await settled()
    turns.lockstep.over(["a"])
    await asyncio.wait_for(waiting, 5)
    assert turns.log[0] == "a begins"


@pytest.mark.parametrize("last", ["over", "episode_over"])
async def test_rewards_wait_for_the_last_episode(last: str) -> None:
    lockstep = Lockstep()
    lockstep.expect(["a", "b"])
    first = asyncio.create_task(lockstep.episode_over("a"))
    await settled()
    assert not first.done()
    ending: dict[str, Callable[[], object]] = {
        "over": lambda: lockstep.over(["b"]),
        "episode_over": lambda: asyncio.ensure_future(lockstep.episode_over("b")),
    }
    ending[last]()
    await asyncio.wait_for(first, 5)


async def test_the_episode_of_a_stranger_waits_for_nobody() -> None:
    lockstep = Lockstep()
    lockstep.expect(["a"])
    await asyncio.wait_for(lockstep.episode_over("evaluation"), 5)
