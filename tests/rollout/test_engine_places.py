from tasks.rollout.fleet_plan import place_engines


def test_engines_are_spread_over_the_rollout_pools_in_turn() -> None:
    assert place_engines(["both"] * 3, ("h20", "h800"), ("h20", "h800")) == {
        "engine-0": ("h20", "both"),
        "engine-1": ("h800", "both"),
        "engine-2": ("h20", "both"),
    }


def test_prefill_workers_have_their_own_pools() -> None:
    placed = place_engines(["prefill", "prefill", "decode", "decode"], ("h20", "l40s"), ("h800",))
    assert list(placed.values()) == [
        ("h800", "prefill"),
        ("h800", "prefill"),
        ("h20", "decode"),
        ("l40s", "decode"),
    ]
