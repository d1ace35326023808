import pytest

from infra.hardware import hardware
from infra.model_size import PUBLIC, ModelSize
from infra.resources import ANYWHERE
from tasks.rollout.affinity_profile import Advice, recommend
from tasks.rollout.roofline import DomainWork, RolloutPool, trajectory_time

QWEN3_8B = ModelSize.of(PUBLIC["Qwen3-8B"])
"""8 190 735 360 parameters, 36 layers of 32 heads of 128, and 147 456 bytes of KV a token."""
H800 = RolloutPool("h800", hardware("h800"), engines=2)
H20 = RolloutPool("h20", hardware("h20"), engines=6)
# How many tokens these have is not published. RollArt's Table 1: FrozenLake has 20 to 100 turns and is
# prefill-heavy, GEM-math fewer than 5 and is decode-heavy; contexts go to 32 k.
FROZEN_LAKE = DomainWork("frozen_lake", trajectories=64, tokens=8000, decoded=600, turns=20)
GEM_MATH = DomainWork("gem_math", trajectories=64, tokens=4000, decoded=3600, turns=2)


def advice(
    current: dict[str, str], *works: DomainWork, pools: tuple[RolloutPool, ...] = (H800, H20)
) -> Advice:
    given = recommend(works, QWEN3_8B, pools, current, running=21)
    assert given is not None
    return given


def test_prefill_goes_to_the_compute_pool_and_decode_to_the_bandwidth_pool() -> None:
    given = advice({"frozen_lake": "h20", "gem_math": "h800"}, FROZEN_LAKE, GEM_MATH)
    assert given.mapping == {"frozen_lake": "h800", "gem_math": "h20"}
    assert given.makespan_s < given.current_s
    assert 0 < given.gain < 1


def test_the_reason_has_the_numbers_that_decide() -> None:
    reasons = advice({"frozen_lake": "h20", "gem_math": "h20"}, FROZEN_LAKE, GEM_MATH).reasons
    assert reasons["frozen_lake"].startswith("frozen_lake: 20.0 turns, 92% prefill; ")
    on_h800, on_h20 = (trajectory_time(FROZEN_LAKE, QWEN3_8B, pool, 21) for pool in (H800, H20))
    assert on_h800 is not None
    assert on_h20 is not None
    share = f"{on_h800.total_s / on_h20.total_s:.2f}"
    assert f"an engine of h800 takes {share} of the time that one of h20 takes" in reasons["frozen_lake"]
    assert "of its cost" in reasons["frozen_lake"]
    assert reasons["gem_math"].startswith("gem_math: 2.0 turns, 90% decode; an engine of h20 takes")


def test_a_pool_that_is_full_sends_a_domain_to_the_next() -> None:
    few = (RolloutPool("h800", hardware("h800"), 6), RolloutPool("h20", hardware("h20"), 1))
    works = [DomainWork(name, 64, 4000, 3600, 2) for name in ("a", "b", "c")]
    given = advice({}, *works, pools=few)
    assert sorted(given.mapping.values()).count("h20") < 2


def test_domains_that_go_anywhere_share_all_pools_and_stay_so_where_that_is_soonest() -> None:
    twins = (RolloutPool("one", hardware("h20"), 1), RolloutPool("three", hardware("h20"), 3))
    time = trajectory_time(GEM_MATH, QWEN3_8B, twins[0], 21)
    assert time is not None
    given = advice({}, GEM_MATH, pools=twins)
    assert given.current_s == pytest.approx(64 * time.total_s / 4)
    assert given.mapping == {"gem_math": ANYWHERE}
    assert given.gain == 0


def test_what_goes_anywhere_fills_up_beside_what_is_bound() -> None:
    twins = (RolloutPool("one", hardware("h20"), 1), RolloutPool("two", hardware("h20"), 1))
    bound = DomainWork("bound", 20, 4000, 3600, 2)
    time = trajectory_time(bound, QWEN3_8B, twins[0], 21)
    assert time is not None
    # 20 bound to "one", 64 anywhere: both pools are done after 42 trajectories each
    given = advice({"bound": "one"}, bound, GEM_MATH, pools=twins)
    assert given.current_s == pytest.approx(42 * time.total_s)
    # 50 bound and 10 anywhere: these go to the free pool alone
    heavy, light = DomainWork("bound", 50, 4000, 3600, 2), DomainWork("gem_math", 10, 4000, 3600, 2)
    assert advice({"bound": "one"}, heavy, light, pools=twins).current_s == pytest.approx(50 * time.total_s)


def test_of_equally_quick_mappings_the_cheaper_is_taken() -> None:
    # The long domain decides the makespan; the short one fits beside it on either pool.
    pools = (RolloutPool("h100", hardware("h100"), 8), RolloutPool("h20", hardware("h20"), 8))
    long = DomainWork("long", 1000, 8000, 600, 20)
    short = DomainWork("short", 1, 4000, 3600, 2)
    given = advice({"long": "h100", "short": "h100"}, long, short, pools=pools)
    assert given.mapping == {"long": "h100", "short": "h20"}


def test_many_domains_are_placed_one_by_one_within_a_third_of_the_best_possible() -> None:
    pools = tuple(RolloutPool(f"p{index}", hardware("h20"), 1) for index in range(4))
    works = [DomainWork(f"d{index}", 10 + index, 4000, 3600, 2) for index in range(10)]
    time = trajectory_time(GEM_MATH, QWEN3_8B, pools[0], 21)
    assert time is not None
    given = advice({work.domain: "p0" for work in works}, *works, pools=pools)
    assert set(given.mapping.values()) == {"p0", "p1", "p2", "p3"}
    assert given.makespan_s <= 4 / 3 * time.total_s * sum(work.trajectories for work in works) / 4


def test_without_work_or_where_the_model_fits_nowhere_there_is_no_advice() -> None:
    assert recommend([], QWEN3_8B, [H20], {}, 1) is None
    assert recommend([GEM_MATH], ModelSize.of(PUBLIC["Qwen3-235B-A22B"]), [H20], {}, 1) is None
