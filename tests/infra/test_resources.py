import pytest

from infra.hardware import hardware
from infra.resources import (
    ANYWHERE,
    Binding,
    NoCompatiblePool,
    Pool,
    ResourceManager,
    bindings_from_json,
    bindings_to_json,
    preferred_pool,
)


def manager(
    *names: str, without: tuple[str, ...] = (), bindings: tuple[Binding, ...] = ()
) -> ResourceManager:
    """Pools named by their hardware, those of `without` not available."""
    pools = [Pool(name, hardware(name), available=name not in without) for name in names]
    return ResourceManager.of(pools, bindings)


def test_a_subject_gets_the_pool_it_asks_for() -> None:
    bound = manager("h20", "h800").bind("domain:swe", "h800")
    assert (bound.pool, bound.moved) == ("h800", False)


def test_a_pool_that_is_gone_falls_back_with_a_warning_that_names_both() -> None:
    bound = manager("h20", "h800", without=("h800",)).bind("domain:swe", "h800")
    assert bound.pool == "h20"
    assert bound.moved
    assert bound.warning() == "domain:swe: pool 'h20' in the place of 'h800': 'h800' is not available"


def test_the_nearest_in_compute_to_bandwidth_stands_in() -> None:
    # Ridges: h800 295.4, h200 206.1, a100 153.0, rtx4090 163.9, h20 37.
    assert manager("h20", "a100", "h200", "h800", "rtx4090").fall_backs("h800") == [
        "h200",
        "rtx4090",
        "a100",
        "h20",
    ]


def test_a_cpu_never_stands_in_for_a_gpu() -> None:
    # Though the CPU's ridge, 46.6, is nearer to an H20's 37 than an H800's is.
    assert manager("cpu", "h800", "h20").fall_backs("h20") == ["h800"]
    with pytest.raises(NoCompatiblePool, match="'cpu' has CPUs only"):
        manager("cpu", "h800", "h20", without=("h20", "h800")).bind("s", "h20")


def test_a_gpu_may_stand_in_for_a_cpu_and_functions_for_neither() -> None:
    assert manager("cpu", "h20", "functions").fall_backs("cpu") == ["h20"]
    assert manager("cpu", "h20", "functions").fall_backs("h20") == []


def test_a_pool_without_memory_for_the_model_is_not_compatible() -> None:
    pools = manager("rtx4090", "l40s", "h20")
    assert pools.fall_backs("h20", 40e9) == ["l40s"]  # 0.9 x 48 GB are 43.2, 0.9 x 24 GB are 21.6
    pools.pools["rtx4090"] = Pool("rtx4090", hardware("rtx4090"), capacity=2)
    assert pools.fall_backs("h20", 40e9) == ["rtx4090", "l40s"]


def test_no_compatible_pool_is_an_error_that_says_why_of_each() -> None:
    pools = manager("rtx4090", "l40s", "h20", without=("h20", "l40s"))
    with pytest.raises(NoCompatiblePool) as raised:
        pools.bind("pools.train", "h20", 40e9)
    message = str(raised.value)
    assert "pools.train: pool 'h20' is not available" in message
    assert "'rtx4090' has 21.6 GB for a model of 40.0 GB" in message
    assert "'l40s' is not available either" in message


def test_without_its_hardware_nothing_stands_in_for_a_pool() -> None:
    pools = ResourceManager.of([Pool("mine", available=False), Pool("h20", hardware("h20"))])
    with pytest.raises(NoCompatiblePool, match=r"pools\.hardware"):
        pools.bind("pools.train", "mine")


def test_bindings_survive_a_restart_and_a_pool_that_came_back_does_not_move_them() -> None:
    first = manager("h20", "h800", without=("h800",))
    first.bind("domain:swe", "h800")
    kept = bindings_from_json(bindings_to_json(first.bindings.values()))
    assert manager("h20", "h800", bindings=tuple(kept)).bind("domain:swe", "h800").pool == "h20"


def test_a_bound_pool_that_vanished_is_bound_anew() -> None:
    kept = Binding("domain:swe", "h800", "h20", "'h800' is not available")
    bound = manager("h20", "h800", "h100", without=("h20", "h800"), bindings=(kept,)).bind(
        "domain:swe", "h800"
    )
    assert bound.pool == "h100"


def test_what_the_campaign_changed_is_bound_anew() -> None:
    kept = (Binding("domain:swe", "h800", "h20", "advice"), Binding("domain:web", "h800", "h20", "advice"))
    resumed = manager("h20", "h800", "h100", bindings=kept)
    assert resumed.bind("domain:swe", "h100") == Binding("domain:swe", "h100", "h100")
    assert resumed.bind("domain:web", "h800").pool == "h20"
    resumed.keep_only(["domain:web"])
    assert list(resumed.bindings) == ["domain:web"]


def test_a_moved_subject_stays_moved() -> None:
    pools = manager("h20", "h800", without=("h800",))
    pools.bind("domain:math", ANYWHERE)
    assert pools.move("domain:math", "h20", "85 % decode") == Binding(
        "domain:math", ANYWHERE, "h20", "85 % decode"
    )
    assert pools.bind("domain:math", ANYWHERE).pool == "h20"
    with pytest.raises(NoCompatiblePool, match="h800"):
        pools.move("domain:math", "h800", "")


def test_worker_classes_have_the_papers_defaults() -> None:
    pools = {name: hardware(name) for name in ("h20", "h800", "cpu", "functions")}
    assert preferred_pool("train", pools) == "h800"
    assert preferred_pool("rollout", pools) == "h20"
    assert preferred_pool("environment", pools) == "cpu"
    assert preferred_pool("reward", pools) == "functions"
    del pools["functions"]
    assert preferred_pool("reward", pools) == "h20"
    assert preferred_pool("train", {"only": hardware("cpu")}) == "only"
    assert preferred_pool("train", {}) is None
