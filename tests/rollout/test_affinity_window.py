import pytest

from tasks.rollout.affinity_profile import Advice
from tasks.rollout.affinity_window import Hysteresis, TrajectoryWindow
from tasks.train.manifests import ManifestEntry


def entry(domain: str, tokens: int, sampled: int, turns: int) -> ManifestEntry:
    return ManifestEntry(
        name="g00000000-m000-a00",
        version=0,
        oldest_version=0,
        domain=domain,
        group=0,
        reward=0.0,
        turns=turns,
        tokens=tokens,
        sampled_tokens=sampled,
    )


def test_work_is_the_mean_of_the_last_steps_by_domain() -> None:
    window = TrajectoryWindow(2)
    window.add([entry("math", 1000, 1000, 9)] * 5)
    window.add([entry("math", 100, 80, 1), entry("web", 400, 40, 10)])
    window.add([entry("math", 200, 100, 3)])
    math, web = window.works()
    assert (math.domain, math.trajectories, math.tokens, math.decoded, math.turns) == (
        "math",
        1.0,
        150,
        90,
        2,
    )
    assert (web.domain, web.trajectories, web.prefilled) == ("web", 0.5, 360)
    assert web.prefill_share == pytest.approx(0.9)


def test_contexts_that_engines_prefill_again_weigh_as_often() -> None:
    window = TrajectoryWindow(2)
    window.add([entry("math", 300, 100, 4)])
    # The engines also ran trajectories that were thrown away: 5 prefilled for each decoded, where the trained
    # ones have 2.
    window.add_engine_work(prefilled=1000, decoded=200)
    (math,) = window.works()
    assert math.prefill_scale == pytest.approx(2.5)
    assert math.prefilled == pytest.approx(500)


@pytest.mark.parametrize(("prefilled", "decoded"), [(0, 10), (10, 0)])
def test_without_counters_each_token_is_prefilled_once(prefilled: int, decoded: int) -> None:
    window = TrajectoryWindow(2)
    window.add([entry("math", 300, 100, 4)])
    window.add_engine_work(prefilled, decoded)
    assert window.works()[0].prefill_scale == 1


def saving(gain: float, **mapping: str) -> Advice:
    return Advice(mapping, makespan_s=1 - gain, current_s=1.0, reasons={}, rows=[])


def test_an_advice_is_followed_once_it_has_held_long_enough() -> None:
    hysteresis = Hysteresis(gain=0.1, patience=2)
    current = {"math": "a"}
    assert [hysteresis.accepts(saving(0.2, math="b"), current) for _ in range(2)] == [False, True]
    assert not hysteresis.accepts(saving(0.0, math="b"), {"math": "b"})


def test_an_advice_that_changes_or_saves_too_little_begins_anew() -> None:
    hysteresis = Hysteresis(gain=0.1, patience=2)
    current = {"math": "a"}
    assert not hysteresis.accepts(saving(0.2, math="b"), current)
    assert not hysteresis.accepts(saving(0.2, math="c"), current)
    assert not hysteresis.accepts(saving(0.05, math="c"), current)
    assert not hysteresis.accepts(saving(0.2, math="c"), current)
    assert hysteresis.accepts(saving(0.2, math="c"), current)


def test_what_goes_anywhere_and_is_left_there_is_no_change() -> None:
    hysteresis = Hysteresis(gain=0.1, patience=1)
    assert not hysteresis.accepts(saving(0.9, math="*"), {})
    assert hysteresis.accepts(saving(0.9, math="a"), {})
