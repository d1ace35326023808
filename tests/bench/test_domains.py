import time

import pytest

from tests.bench.domains import SlowTurns, Sums


def test_sums_rewards_the_exact_sum_and_nothing_else() -> None:
    for seed in range(40):
        environment = Sums()
        left, right = environment.reset(seed).removesuffix("=").split("+")
        total = str(int(left) + int(right))
        for action, reward in [(total, 1.0), (total + " ", 0.0), ("0" + total, 0.0), ("", 0.0)]:
            environment.reset(seed)
            result = environment.step(action)
            assert (result.reward, result.terminated, result.info) == (reward, True, {"answer": total})


def test_the_same_seed_gives_the_same_episode() -> None:
    for environment in (Sums(), SlowTurns(latency_ms=0)):
        assert [environment.reset(5) for _ in range(3)] == [environment.reset(5)] * 3
        assert len({environment.reset(seed) for seed in range(50)}) > 5


def test_slow_turns_returns_the_share_of_turns_that_begin_with_the_digit_shown() -> None:
    environment = SlowTurns(turns=4, latency_ms=0)
    observation, rewards, ends = environment.reset(3), [], []
    for scored in (True, False, True, True):
        digit = observation[0]
        assert observation == f"{digit}?"
        assert digit.isdigit()
        result = environment.step(f"{digit} a" if scored else f"a{digit}")
        observation = result.observation
        rewards.append(result.reward)
        ends.append(result.terminated)
    assert rewards == [0.25, 0.0, 0.25, 0.25]
    assert ends == [False, False, False, True]
    assert observation == ""


def test_every_turn_takes_its_latency() -> None:
    environment = SlowTurns(turns=2, latency_ms=20)
    environment.reset(0)
    begin = time.perf_counter()
    environment.step("")
    environment.step("")
    assert time.perf_counter() - begin >= 0.04


@pytest.mark.parametrize("environment", [Sums(), SlowTurns(turns=1, latency_ms=0)])
def test_a_step_outside_an_episode_is_an_error(environment: Sums | SlowTurns) -> None:
    with pytest.raises(RuntimeError, match="step before reset"):
        environment.step("1")


@pytest.mark.parametrize("options", [{"turns": 0}, {"latency_ms": -1.0}])
def test_impossible_options_are_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SlowTurns(**options)  # type: ignore[arg-type]
