"""Which turns go through a prefill worker, and the options that say how many workers there are."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.rollout.config import RolloutConfig
from tasks.rollout.prefill import PrefillPlan


def test_a_first_turn_goes_through_a_prefill_worker_if_it_is_long_enough() -> None:
    plan = PrefillPlan(100)
    assert not plan.is_worthwhile("t", 100, version=0)  # 99 to compute: the last one is the decoder's
    assert plan.is_worthwhile("t", 101, version=0)
    assert PrefillPlan(1).is_worthwhile("t", 2, version=0)
    assert not PrefillPlan(1).is_worthwhile("t", 1, version=0)


def test_of_a_later_turn_only_what_came_since_counts() -> None:
    plan = PrefillPlan(100)
    plan.decoded("t", "decoder", tokens=500, version=0)
    assert plan.uncached("t", 540, version=0) == 540 - 1 - 499
    assert not plan.is_worthwhile("t", 599, version=0)
    assert plan.is_worthwhile("t", 600, version=0)
    assert plan.uncached("other", 540, version=0) == 539


def test_an_update_leaves_nothing_cached() -> None:
    plan = PrefillPlan(100)
    plan.decoded("t", "decoder", tokens=500, version=0)
    assert plan.uncached("t", 540, version=1) == 539
    plan.decoded("t", "decoder", tokens=560, version=1)
    assert plan.uncached("t", 570, version=1) == 10


def test_a_lost_decoder_leaves_nothing_cached() -> None:
    plan = PrefillPlan(100)
    plan.decoded("t", "decoder", tokens=500, version=0)
    assert plan.decoder("t") == "decoder"
    plan.lost("t")
    assert plan.decoder("t") is None
    assert plan.uncached("t", 540, version=0) == 539
    plan.lost("unknown")


def test_a_trajectory_stays_with_its_prefill_worker_until_it_is_over() -> None:
    plan = PrefillPlan(100)
    for trajectory, prefiller in (("a", "p0"), ("b", "p1"), ("c", "p0")):
        plan.prefilled(trajectory, prefiller)
    plan.decoded("d", "decoder", tokens=9, version=0)
    assert plan.prefiller("a") == "p0"
    assert plan.finish(["a", "b", "c", "d", "unknown"]) == {"p0": ["a", "c"], "p1": ["b"]}
    assert plan.prefiller("a") is None
    assert plan.finish(["a"]) == {}
    assert plan.uncached("d", 9, version=0) == 8


@given(
    turns=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 50)), min_size=1, max_size=12),
    least=st.integers(1, 200),
)
def test_every_token_is_prefilled_once(turns: list[tuple[int, int]], least: int) -> None:
    """Observed and sampled tokens of a trajectory's turns: whoever prefills, all but the last of a turn's
    context has KV before it samples, and no token is prefilled twice."""
    plan, context, has_kv = PrefillPlan(least), 0, 0
    for observed, sampled in turns:
        context += observed
        uncached = plan.uncached("t", context, version=0)
        assert uncached == context - 1 - has_kv
        assert plan.is_worthwhile("t", context, version=0) == (uncached >= least)
        context += sampled
        # The turn's own last token, if it samples any, gets KV with the next turn.
        has_kv = context - 1
        plan.decoded("t", "decoder", context, version=0)


def roles(**engine: Any) -> list[str]:
    return list(RolloutConfig.model_validate({"engine": engine}).worker_roles)


@pytest.mark.parametrize("kind", ["torch", "vllm"])
def test_the_ratio_of_prefill_to_decode_is_an_option(kind: str) -> None:
    assert roles(kind=kind, workers=4, prefill_workers=1) == ["prefill", "decode", "decode", "decode"]
    assert roles(kind=kind, workers=3, prefill_workers=2) == ["prefill", "prefill", "decode"]
    assert roles(kind=kind, workers=2) == ["both", "both"]


@pytest.mark.parametrize("prefill_workers", [2, 3])
def test_at_least_one_worker_decodes(prefill_workers: int) -> None:
    with pytest.raises(ValidationError, match=r"prefill_workers \(\d\) must be below workers \(2\)"):
        roles(kind="torch", workers=2, prefill_workers=prefill_workers)


def test_engines_that_share_no_kv_have_no_prefill_workers() -> None:
    assert roles(kind="simulated", workers=2) == ["both", "both"]
    with pytest.raises(ValidationError, match="prefill_workers"):
        roles(kind="simulated", workers=2, prefill_workers=1)
