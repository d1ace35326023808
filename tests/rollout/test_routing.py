import pytest

from tasks.rollout.routing import NoWorker, Router


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
