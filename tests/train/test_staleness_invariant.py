"""No token of a trained trajectory is older than alpha versions, and nothing is lost or trained twice.

Random schedules of events on the real pure machines: `tests.train.schedules` says what is drawn and checked.
"""

import itertools
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tasks.train.config import GrpoConfig, RedundancyConfig, TrainConfig
from tasks.train.ends import Fate
from tasks.train.modes import MODES, ModeName
from tests.train.schedules import Schedule, Troubles

BOUNDED: tuple[ModeName, ...] = ("tutti", "sync", "sync_plus", "one_off")
NO_TROUBLES = Troubles(faults=0, hangs=0, worker_deaths=0, deadlines=0, duplicates=0, kills=0)


@st.composite
def troubles(draw: st.DrawFn) -> Troubles:
    return Troubles(
        faults=draw(st.integers(0, 60)),
        hangs=draw(st.integers(0, 200)),
        worker_deaths=draw(st.integers(0, 20)),
        deadlines=draw(st.integers(0, 10)),
        duplicates=draw(st.integers(0, 300)),
        kills=draw(st.integers(0, 4)),
        wire_delay=draw(st.integers(0, 990)),
    )


@st.composite
def schedules(draw: st.DrawFn, modes: tuple[ModeName, ...], most_steps: int) -> Schedule:
    mode = MODES[draw(st.sampled_from(modes))]
    alpha = draw(st.integers(mode.lowest_alpha, 4 if mode.highest_alpha is None else mode.highest_alpha))
    size = draw(st.integers(1, 5))
    redundancy = RedundancyConfig(groups=draw(st.integers(0, 3)), members=draw(st.integers(0, 2)))
    # A group of one has no variance, so it would be refilled for ever.
    zero_variance = draw(st.sampled_from(["keep", "refill"] if size > 1 else ["keep"]))
    train = TrainConfig(
        mode=mode.name,
        alpha=alpha,
        groups=draw(st.integers(1, 5)),
        group_size=size,
        steps=draw(st.integers(most_steps // 2, most_steps)),
        redundancy=RedundancyConfig() if mode.lockstep else redundancy,
        algorithm=GrpoConfig(zero_variance=zero_variance, refill_tries=10**6),
    )
    domains = draw(st.lists(st.floats(0.2, 5.0), min_size=1, max_size=4))
    return Schedule(
        train,
        {f"domain{index}": weight for index, weight in enumerate(domains)},
        attempts=draw(st.integers(1, 3)),
        troubles=draw(troubles()),
        seed=draw(st.integers(0, 2**63)),
        checkpoint_every=draw(st.integers(1, 3)),
    )


def play_whole(schedule: Schedule) -> None:
    schedule.play(30_000)
    schedule.finish()


def played(modes: tuple[ModeName, ...], *, events: int, most_steps: int) -> Counter[str]:
    """Play whole runs until so many events have happened; returns these and the trajectories of each fate."""
    totals: Counter[str] = Counter()

    # Schedules of random numbers do not shrink to simpler ones.
    @settings(
        max_examples=20,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schedules(modes, most_steps))
    def play(schedule: Schedule) -> None:
        play_whole(schedule)
        totals.update(schedule.reasons)
        totals["events"] += schedule.events
        totals["kills"] += schedule.kills
        totals["greatest staleness"] = max(totals["greatest staleness"], schedule.greatest_staleness)

    rounds = itertools.count()
    while totals["events"] < events:
        seed(next(rounds))(play)()
    return totals


def assert_all_fates(totals: Counter[str]) -> None:
    assert all(totals[fate] for fate in Fate), totals
    assert totals["kills"]


def test_the_bound_holds_under_any_schedule() -> None:
    totals = played(BOUNDED, events=50_000, most_steps=12)
    assert_all_fates(totals)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_bound_holds_over_millions_of_events() -> None:
    totals = played(BOUNDED, events=2_000_000, most_steps=60)
    assert totals["greatest staleness"] == 4
    assert_all_fates(totals)


def test_areal_keeps_every_promise_but_the_bound_and_the_same_checks_see_it_broken() -> None:
    beyond = 0
    for number in range(12):
        train = TrainConfig(mode="areal", alpha=1, groups=3, group_size=3, steps=20)
        schedule = Schedule(train, {"a": 2.0, "b": 1.0}, 2, Troubles(), number)
        play_whole(schedule)
        assert schedule.reasons[Fate.STALE] == 0
        beyond += schedule.greatest_staleness > train.alpha
    assert beyond > 0


@pytest.mark.parametrize(("mode", "alpha"), [("tutti", 1), ("sync", 0), ("sync_plus", 0), ("one_off", 1)])
def test_without_troubles_every_token_that_no_bound_forbids_is_trained(mode: ModeName, alpha: int) -> None:
    train = TrainConfig(
        mode=mode,
        alpha=alpha,
        groups=3,
        group_size=3,
        steps=20,
        algorithm=GrpoConfig(zero_variance="keep"),
    )
    schedule = Schedule(train, {"a": 2.0, "b": 1.0}, 3, NO_TROUBLES, seed=5)
    play_whole(schedule)
    assert schedule.reasons[Fate.TRAINED] >= 20 * 3
    given_up = {fate for fate in Fate if schedule.reasons[fate]} - {Fate.TRAINED, Fate.FAILED}
    assert given_up <= ({Fate.STALE} if mode == "tutti" else set())


def test_one_off_trains_every_batch_after_the_first_at_staleness_1() -> None:
    train = TrainConfig(
        mode="one_off", alpha=1, groups=2, group_size=2, steps=12, redundancy=RedundancyConfig(groups=1)
    )
    schedule = Schedule(train, {"a": 1.0}, 2, Troubles(kills=0), seed=3)
    play_whole(schedule)
    ages = [
        {batch.step - entry.oldest_version for entry in batch.trajectories}
        for batch in schedule.history.manifests
    ]
    assert ages == [{0}, *([{1}] * 11)]
