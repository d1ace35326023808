import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.simulation.what_if.candidates import Axis, Point, Space
from tasks.simulation.what_if.pareto import dominates, front
from tasks.simulation.what_if.prediction import Objective
from tasks.simulation.what_if.search import Limits, Search
from tests.simulation.what_if.predictions import prediction, split

SIZES = tuple(range(8, 264, 8))
SPACE = Space.of([Axis(("rollout",), SIZES), Axis(("train",), SIZES)])


def devices(point: Point) -> tuple[int, int]:
    changes = SPACE.changes(point)
    return changes["rollout"], changes["train"]


def outcome(point: Point):
    return split(*devices(point))


def rent_within(budget: float):
    limits = Limits(usd_per_hour=budget)
    return limits, lambda point: limits.rent_problem(2.0 * sum(devices(point)))


def run(search: Search, simulate=outcome) -> int:
    simulated = 0
    while asked := search.ask():
        for point in asked:
            search.tell(point, simulate(point))
        simulated += len(asked)
    return simulated


POINTS = st.dictionaries(
    st.integers(), st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12
)


@given(POINTS)
def test_the_front_is_what_nothing_dominates(costs):
    kept = front(costs)
    assert kept
    for name, own in costs.items():
        beaten = any(dominates(other, own) for other in costs.values())
        assert (name in kept) == (not beaten)
    assert [costs[name][0] for name in kept] == sorted(costs[name][0] for name in kept)


def test_of_a_small_space_every_candidate_is_simulated():
    small = Space.of([Axis(("rollout",), (8, 16, 32)), Axis(("train",), (8, 16))])
    search = Search(small, lambda _: None, most=6)
    asked = search.ask()
    assert sorted(asked) == sorted(small.points())
    for point in asked:
        changes = small.changes(point)
        search.tell(point, split(changes["rollout"], changes["train"]))
    assert search.ask() == []
    best = search.best()
    assert best is not None
    assert small.changes(best) == {"rollout": 32, "train": 16}


def test_what_is_over_the_budget_is_not_simulated():
    limits, admit = rent_within(96)
    search = Search(SPACE, admit, limits=limits, most=SPACE.size)
    simulated = run(search)
    # 8 i + 8 j <= 48 with i, j from 1: 1 + 2 + 3 + 4 + 5 pairs.
    assert simulated == 15
    best = search.best()
    assert best is not None
    assert devices(best) == (32, 16), "two parts rollout to one of training balance at 48 devices"
    assert len(search.rejected) == SPACE.size - 15
    assert "over the budget of 96" in next(iter(search.rejected.values()))


def test_a_large_space_is_searched_to_its_front_with_few_simulations():
    limits, admit = rent_within(384)
    search = Search(SPACE, admit, limits=limits, most=100)
    simulated = run(search)
    assert simulated <= 100 < SPACE.size / 10
    best = search.best()
    assert best is not None
    assert outcome(best).step_seconds <= 1.05 * split(128, 64).step_seconds, "the optimum of 192 devices"
    assert (
        all(
            neighbour in search.predictions or neighbour in search.rejected
            for neighbour in SPACE.neighbours(best)
        )
        or simulated == 100
    )


def test_a_search_is_the_same_every_time():
    def path() -> list[Point]:
        search = Search(SPACE, lambda _: None, most=40, seed=3)
        run(search)
        return list(search.predictions)

    assert path() == path()


def test_limits_that_only_a_simulation_can_tell_turn_a_candidate_down_with_its_numbers():
    search = Search(SPACE, lambda _: None, limits=Limits(step_seconds=10), most=SPACE.size)
    run(search)
    best = search.best()
    assert best is not None
    assert outcome(best).step_seconds <= 10
    slow = SPACE.points().__next__()
    assert slow in search.predictions
    assert "150 s, over the limit of 10" in search.rejected[slow]
    assert all(outcome(point).step_seconds <= 10 for point in search.front())


def test_a_candidate_that_cannot_be_simulated_is_not_compared():
    search = Search(SPACE, lambda _: None, most=SPACE.size)
    run(search, lambda point: "does not fit" if devices(point)[0] > 8 else outcome(point))
    best = search.best()
    assert best is not None
    assert devices(best)[0] == 8
    assert len(search.rejected) == SPACE.size - len(SIZES)


def test_without_any_that_keeps_the_limits_there_is_no_best():
    search = Search(SPACE, lambda _: None, limits=Limits(usd_per_step=1e-6), most=20)
    assert run(search) == 20
    assert search.best() is None
    assert search.front() == []


def test_asking_before_telling_is_an_error():
    search = Search(SPACE, lambda _: None, most=4)
    search.ask()
    with pytest.raises(RuntimeError, match="not told"):
        search.ask()


def test_throughput_compares_what_tokens_cost():
    small, large = prediction(10, 36, tokens_per_s=100), prediction(20, 36, tokens_per_s=400)
    # 36 USD an hour are 0.01 a second: 100 tokens a second are 1e6 in 10**4 s, for 100 USD.
    assert Objective.THROUGHPUT.costs(small) == pytest.approx((100, -100))
    assert dominates(Objective.THROUGHPUT.costs(large), Objective.THROUGHPUT.costs(small))
    assert dominates(Objective.STEP_TIME.costs(small), Objective.STEP_TIME.costs(large))
