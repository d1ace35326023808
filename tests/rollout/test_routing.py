import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tasks.rollout.routing import FallBack, NoWorker, Router


def router(*names: str, pools: dict[str, str] | None = None) -> Router:
    made = Router(pools)
    for name in names:
        worker, _, pool = name.partition("@")
        made.add_worker(worker, pool or "default")
    return made


def test_a_trajectory_stays_with_its_worker() -> None:
    routes = router("a", "b")
    first = routes.route("t", "math")
    for other in range(5):
        routes.route(f"other-{other}", "math")
    assert routes.route("t", "math") == first


def test_new_trajectories_go_where_the_fewest_are_open() -> None:
    routes = router("a", "b")
    assert [routes.route(f"t{index}", "math") for index in range(4)] == ["a", "b", "a", "b"]
    routes.release("t1")
    assert routes.route("t4", "math") == "b"


def test_a_domain_prefers_its_pool_and_falls_back_to_another() -> None:
    routes = router("fast@h800", "wide@h20", pools={"swe": "h800", "math": "h20"})
    assert routes.route("t0", "swe") == "fast"
    assert routes.route("t1", "math") == "wide"
    routes.set_aside("wide")
    assert routes.route("t2", "math") == "fast"


def test_a_lost_workers_trajectories_go_on_elsewhere() -> None:
    routes = router("a", "b")
    assert routes.route("t", "math") == "a"
    routes.set_aside("a")
    assert routes.route("t", "math") == "b"
    assert routes.release("t") == "b"


def test_a_worker_is_set_aside_after_failures_in_a_row_only() -> None:
    routes = router("a", "b")
    assert [routes.failed("a"), routes.failed("a")] == [False, False]
    routes.succeeded("a")
    assert [routes.failed("a"), routes.failed("a"), routes.failed("a")] == [False, False, True]


def test_with_no_worker_left_it_says_so() -> None:
    routes = router("a")
    routes.set_aside("a")
    with pytest.raises(NoWorker, match="math"):
        routes.route("t", "math")


def test_removing_a_worker_forgets_its_trajectories() -> None:
    routes = router("a", "b")
    routes.route("t", "math")
    routes.remove_worker("a")
    assert routes.route("t", "math") == "b"


def fall_backs(*pairs: str, fall_back_order: dict[str, list[str]] | None = None, **affinity: str) -> Any:
    heard: list[FallBack] = []
    routes = Router(affinity, fall_backs=fall_back_order, on_fall_back=heard.append)
    for pair in pairs:
        worker, _, pool = pair.partition("@")
        routes.add_worker(worker, pool)
    return routes, heard


def test_the_default_pool_is_that_of_domains_not_named() -> None:
    routes, heard = fall_backs("a@h800", "b@h20", swe="h800", default="h20")
    assert [routes.route("t0", "swe"), routes.route("t1", "math"), routes.route("t2", "web")] == [
        "a",
        "b",
        "b",
    ]
    assert heard == []


def test_a_fall_back_takes_the_nearest_pool_and_is_told_once_for_a_domain_and_pool() -> None:
    routes, heard = fall_backs(
        "a@h800", "b@h20", "c@h100", fall_back_order={"h800": ["h100", "h20"]}, swe="h800", default="h800"
    )
    routes.set_aside("a")
    assert {routes.route(f"t{index}", "swe") for index in range(5)} == {"c"}
    routes.restore("a")
    assert routes.route("back", "swe") == "a"
    routes.set_aside("a")
    assert routes.route("again", "swe") == "c"
    assert heard == [FallBack("swe", "h800", "h100")]
    routes.route("other", "math")
    assert heard[1:] == [FallBack("math", "h800", "h100")]


def test_without_a_compatible_pool_a_domain_goes_to_whatever_is_left() -> None:
    routes, heard = fall_backs("b@h20", "c@cpu", swe="h800")
    assert {routes.route("t0", "swe"), routes.route("t1", "swe")} == {"b", "c"}
    assert heard == [FallBack("swe", "h800", "cpu, h20")]


def test_the_fall_back_is_logged_with_both_pools(caplog: pytest.LogCaptureFixture) -> None:
    routes = Router({"swe": "h800"})
    routes.add_worker("b", "h20")
    for index in range(3):
        routes.route(f"t{index}", "swe")
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "'h800'" in warnings[0]
    assert "'h20'" in warnings[0]


def test_a_restored_worker_gets_new_trajectories_and_none_back() -> None:
    routes = router("a", "b")
    assert routes.route("t", "math") == "a"
    routes.set_aside("a")
    assert routes.route("t", "math") == "b"
    routes.restore("a")
    assert routes.route("t", "math") == "b"
    assert routes.route("new", "math") == "a"


def test_a_restored_worker_is_set_aside_after_as_many_failures_as_before() -> None:
    routes = router("a", "b")
    assert [routes.failed("a") for _ in range(3)] == [False, False, True]
    routes.restore("a")
    assert [routes.failed("a") for _ in range(3)] == [False, False, True]


def test_rebinding_moves_new_trajectories_only() -> None:
    routes, _ = fall_backs("a@h800", "b@h20", swe="h800", default="h20")
    assert routes.route("old", "swe") == "a"
    routes.rebind({"swe": "h20", "default": "h20"})
    assert routes.route("old", "swe") == "a"
    assert routes.route("new", "swe") == "b"


def test_a_prefill_worker_is_given_no_turn_and_the_least_busy_one_the_next_prefill() -> None:
    routes = Router()
    assert routes.route_prefill("math") is None
    routes.add_worker("p0", "h800", "prefill")
    routes.add_worker("p1", "h800", "prefill")
    routes.add_worker("d", "h20", "decode")
    assert {routes.route(f"t{index}", "math") for index in range(4)} == {"d"}
    assert [routes.route_prefill("math") for _ in range(3)] == ["p0", "p1", "p0"]
    routes.prefilled("p0")
    routes.prefilled("p0")
    assert routes.route_prefill("math") == "p0"
    routes.set_aside("p0")
    routes.set_aside("p1")
    assert routes.route_prefill("math") is None


def test_a_prefill_stays_in_its_domains_pool_where_that_has_a_prefill_worker() -> None:
    routes = Router({"math": "h20"})
    routes.add_worker("p0", "h800", "prefill")
    routes.add_worker("p1", "h20", "prefill")
    assert [routes.route_prefill("math"), routes.route_prefill("math")] == ["p1", "p1"]
    assert routes.route_prefill("web") == "p0"


def test_turns_are_counted_by_domain_and_pool() -> None:
    routes, _ = fall_backs("a@h800", "b@h20", swe="h800", default="h20")
    for _ in range(3):
        routes.route("t0", "swe")
    routes.route("t1", "math")
    assert routes.served() == {"swe": {"h800": 3}, "math": {"h20": 1}}


def test_a_name_is_one_workers_only() -> None:
    routes = router("a")
    with pytest.raises(ValueError, match="'a' already"):
        routes.add_worker("a")


POOLS = ("p", "q", "r")
DOMAINS = ("math", "swe", "web")
TRAJECTORIES = [f"t{index}" for index in range(12)]


class Routing(RuleBasedStateMachine):
    """The router against a record of what it answered; everything it promises is checked at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[FallBack] = []
        self.affinity: dict[str, str] = {}
        self.routes = Router({}, fall_backs={"p": ["q"]}, on_fall_back=self.heard.append)
        self.pool: dict[str, str] = {}
        self.down: set[str] = set()
        self.prefill: set[str] = set()
        self.failures: dict[str, int] = {}
        self.placed: dict[str, str] = {}
        self.told: set[tuple[str, str]] = set()

    @rule(
        name=st.sampled_from([f"w{index}" for index in range(6)]),
        pool=st.sampled_from(POOLS),
        role=st.sampled_from(["both", "both", "decode", "prefill"]),
    )
    def add(self, name: str, pool: str, role: Any) -> None:
        if name in self.pool:
            return
        self.routes.add_worker(name, pool, role)
        self.pool[name], self.failures[name] = pool, 0
        if role == "prefill":
            self.prefill.add(name)

    def serving(self) -> set[str]:
        return set(self.pool) - self.down - self.prefill

    @rule(trajectory=st.sampled_from(TRAJECTORIES), domain=st.sampled_from(DOMAINS))
    def route(self, trajectory: str, domain: str) -> None:
        if not self.serving() and self.placed.get(trajectory) not in set(self.pool) - self.down:
            with pytest.raises(NoWorker):
                self.routes.route(trajectory, domain)
            return
        loads = Counter(self.placed.values())
        before = self.placed.get(trajectory)
        name = self.routes.route(trajectory, domain)
        if before is not None and before not in self.down:
            assert name == before
            return
        assert name in self.serving()
        wanted = self.affinity.get(domain, self.affinity.get("default"))
        order = [wanted, "q"] if wanted == "p" else [wanted]
        among = next(
            (
                same
                for pool in order
                if (same := [worker for worker in self.serving() if self.pool[worker] == pool])
            ),
            list(self.serving()),
        )
        if wanted is not None and self.pool[name] != wanted:
            self.told.add((domain, wanted))
        assert name == min(among, key=lambda worker: (loads[worker], worker))
        self.placed[trajectory] = name

    @rule(trajectory=st.sampled_from(TRAJECTORIES))
    def release(self, trajectory: str) -> None:
        assert self.routes.release(trajectory) == self.placed.pop(trajectory, None)

    @precondition(lambda self: self.pool)
    @rule(data=st.data())
    def set_aside(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.pool)))
        self.routes.set_aside(name)
        self.down.add(name)

    @precondition(lambda self: self.pool)
    @rule(data=st.data())
    def restore(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.pool)))
        self.routes.restore(name)
        self.down.discard(name)
        self.failures[name] = 0

    @precondition(lambda self: self.pool)
    @rule(data=st.data())
    def fail(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.pool)))
        self.failures[name] += 1
        falls = name not in self.down and self.failures[name] >= 3
        assert self.routes.failed(name) == falls
        if falls:
            self.down.add(name)

    @precondition(lambda self: self.pool)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.pool)))
        self.routes.remove_worker(name)
        del self.pool[name]
        self.down.discard(name)
        self.prefill.discard(name)
        self.placed = {trajectory: worker for trajectory, worker in self.placed.items() if worker != name}

    @rule(affinity=st.dictionaries(st.sampled_from([*DOMAINS, "default"]), st.sampled_from([*POOLS, "none"])))
    def rebind(self, affinity: dict[str, str]) -> None:
        self.routes.rebind(affinity)
        self.affinity = affinity
        self.heard.clear()
        self.told.clear()

    @invariant()
    def loads_are_exact(self) -> None:
        loads = Counter(self.placed.values())
        assert {worker.name: len(worker.trajectories) for worker in self.routes.workers} == {
            name: loads[name] for name in self.pool
        }
        assert self.routes.open_trajectories == len(self.placed)

    @invariant()
    def each_fall_back_is_told_once(self) -> None:
        told = [(fall_back.domain, fall_back.preferred) for fall_back in self.heard]
        assert len(told) == len(set(told))
        assert self.told <= set(told)


Routing.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestRouting = Routing.TestCase


def seconds_a_route(open_trajectories: int, turns: int = 4, routed: int = 2_000) -> float:
    """Of new trajectories with `turns` turns each on 16 workers, beside as many that stay open; best of 5."""
    routes = Router({"swe": "p0", "default": "p1"})
    for index in range(16):
        routes.add_worker(f"engine-{index}", f"p{index % 2}")
    for index in range(open_trajectories):
        routes.route(f"open-{index}", DOMAINS[index % 3])
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for index in range(routed // turns):
            name, domain = f"t{index}", DOMAINS[index % 3]
            for _ in range(turns):
                routes.route(name, domain)
            routes.release(name)
        best = min(best, time.perf_counter() - started)
    return best / routed


def test_a_route_costs_the_same_however_many_trajectories_are_open() -> None:
    assert seconds_a_route(10_000) < 10 * seconds_a_route(100)
