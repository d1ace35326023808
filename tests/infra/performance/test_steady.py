from dataclasses import dataclass

import pytest

from infra.performance.steady import Load, Overloaded, under_concurrency, under_rate


@dataclass
class Clockwork:
    """10 ms an iteration with any number of decodes, and 1 ms for 100 tokens of a prompt."""

    def seconds(self, work):
        return 0.010 + work.prefill_tokens * 1e-5


LOAD = Load(prompt_tokens=1000, response_tokens=100)


def test_prompts_of_others_stretch_the_time_between_tokens():
    state = under_rate(Clockwork(), LOAD, rate=20)
    # 20 prompts a second take 10 ms each: a fifth of the time
    assert state.token_s == pytest.approx(0.010 / 0.8)
    assert state.first_token_s == pytest.approx(0.005 + 0.010 + 0.010)
    assert state.running == pytest.approx(20 * (0.025 + 100 * 0.0125), rel=1e-4)
    assert state.latency_s(LOAD) == pytest.approx(0.025 + 1.25)


def test_with_so_many_at_a_time_the_rate_is_what_their_latency_gives():
    state = under_concurrency(Clockwork(), LOAD, running=10)
    rate = 10 / state.latency_s(LOAD)
    assert state.token_s == pytest.approx(0.010 / (1 - rate * 0.010), rel=1e-6)


def test_more_than_an_engine_can_do_is_refused():
    with pytest.raises(Overloaded):
        under_rate(Clockwork(), LOAD, rate=120)
