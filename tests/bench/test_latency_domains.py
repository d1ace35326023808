import statistics
import time

import pytest

from tests.bench import latency_domains
from tests.bench.latency_domains import NoisyTurns, TroubledTurns


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the environments would have slept."""
    seconds: list[float] = []
    monkeypatch.setattr(latency_domains.time, "sleep", seconds.append)
    return seconds


def play(environment: NoisyTurns, seed: int, actions: str) -> None:
    environment.reset(seed)
    ends = [environment.step(action).terminated for action in actions]
    assert ends == [False] * (len(actions) - 1) + [True]


def test_turns_wait_as_the_distribution_says(slept: list[float]) -> None:
    for seed in range(300):
        play(NoisyTurns(turns=10, mean_ms=200, sigma_ms=60), seed, "abcdefghij")
    # 3000 draws: the standard error of the mean is 1.1 ms, of the deviation 0.8 ms.
    assert statistics.mean(slept) == pytest.approx(0.2, abs=0.006)
    assert statistics.stdev(slept) == pytest.approx(0.06, abs=0.004)


def test_no_wait_is_negative(slept: list[float]) -> None:
    for seed in range(100):
        play(NoisyTurns(turns=5, mean_ms=200, sigma_ms=200), seed, "abcde")
    assert min(slept) == 0.0
    # P(N(200, 200) < 0) = 0.159; five standard deviations of a share of 500.
    assert slept.count(0.0) / 500 == pytest.approx(0.159, abs=0.082)


def test_a_trajectory_waits_equally_long_whenever_it_is_played_and_others_differ(slept: list[float]) -> None:
    for seed, actions in ((1, "abc"), (1, "abc"), (1, "abd"), (2, "abc")):
        play(NoisyTurns(turns=3, mean_ms=200, sigma_ms=60), seed, actions)
    first, again, other_action, other_seed = (slept[start : start + 3] for start in range(0, 12, 3))
    assert first == again
    assert other_action[:2] == first[:2]
    assert other_action[2] != first[2]
    assert other_seed[0] != first[0]


def test_members_of_a_group_have_different_rewards(slept: list[float]) -> None:
    rewards = []
    for action in "abcdefghijklmnopqrst":
        environment = NoisyTurns(turns=1, mean_ms=1, sigma_ms=0)
        environment.reset(7)
        rewards.append(environment.step(action).reward)
    assert set(rewards) == {0.0, 1.0}


def test_it_really_waits() -> None:
    environment = NoisyTurns(turns=1, mean_ms=30, sigma_ms=0)
    environment.reset(0)
    began = time.perf_counter()
    environment.step("")
    assert time.perf_counter() - began >= 0.03


def test_one_reset_in_ten_fails_or_hangs(slept: list[float]) -> None:
    raised = hung = 0
    for seed in range(2000):
        try:
            TroubledTurns(turns=3, reset_ms=100, step_ms=10, sigma=0.5, hang_ms=60_000).reset(seed)
        except ConnectionError:
            raised += 1
        except TimeoutError:
            hung += 1
    assert slept.count(60.0) == hung
    # Shares of 0.05 of 2000: five standard deviations are 49.
    assert raised == pytest.approx(100, abs=49)
    assert hung == pytest.approx(100, abs=49)
    assert statistics.median(seconds for seconds in slept if seconds < 60) == pytest.approx(0.1, rel=0.1)


def test_steps_have_a_rare_long_tail(slept: list[float]) -> None:
    environment = TroubledTurns(
        turns=4, reset_ms=1, step_ms=10, sigma=0, hang_ms=1, failures=0, tails=0.1, tail_factor=8
    )
    for seed in range(500):
        environment.reset(seed)
        assert [environment.step("").terminated for _ in range(4)] == [False, False, False, True]
    steps = [seconds for seconds in slept if seconds > 0.002]
    assert set(steps) == {0.01, 0.08}
    assert steps.count(0.08) / len(steps) == pytest.approx(0.1, abs=5 * 0.3 / 2000**0.5)


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (NoisyTurns, {"turns": 0, "mean_ms": 1, "sigma_ms": 1}, "turns"),
        (NoisyTurns, {"turns": 1, "mean_ms": -1, "sigma_ms": 1}, "mean_ms"),
        (TroubledTurns, {"turns": 0, "reset_ms": 1, "step_ms": 1, "sigma": 1, "hang_ms": 1}, "turns"),
        (
            TroubledTurns,
            {"turns": 1, "reset_ms": 1, "step_ms": 1, "sigma": 1, "hang_ms": 1, "failures": 2},
            "failures",
        ),
    ],
)
def test_impossible_options_are_refused_by_name(kind: type, options: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        kind(**options)
