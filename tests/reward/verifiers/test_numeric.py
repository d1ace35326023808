from fractions import Fraction

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from tasks.reward.functions import RewardInput, judge, resolve
from tasks.reward.verifiers.numeric import number_in, verify
from tasks.trajectory import InfraError, Reward, Skip

TAIL = "Let me check that again, carefully. " * 40


def judged(gold: object, *actions: str) -> float | Skip:
    return verify(RewardInput("d", 1, "p", actions, ("",), (0.0,), "terminated", {"gold": gold}))


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("42", "2+40=42\n#### 42\n"),
        ("42", "2+40=42\n#### 42\n" + TAIL),
        ("42", f"{TAIL}\n#### 42"),
        ("She sold 48 / 2 = 24.\n#### 72", "The total is 72 clips, altogether."),
        ("72", "Natalia sold 48+24 = 72 clips altogether in April and May."),
        ("1234", "It costs $1,234."),
        ("1,234.50", "1234.5"),
        ("-3", "#### -3"),
        ("-3", "The answer is −3"),
        ("5", "3 - 8 is not it; 13-8 = 5"),
        ("0.5", r"\boxed{\frac{1}{2}}"),
        ("0.5", "1/2"),
        ("50%", "0.5"),
        ("50", "50 %"),
        ("3", "There are 3."),
        (3, "3.0"),
        ("100000", "#### 1e5"),
        ("10", r"\boxed{10}, as 20 would be too much"),
        ("18", r"\boxed{x = 18}"),
    ],
)
def test_right(gold, response):
    assert judged(gold, response) == 1.0


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("42", "#### 43\n" + "42 " * 3),
        ("72", "no number at all, sorry,"),
        ("72", ""),
        ("1234", "1,2345"),
        ("0.0000001", "0.0000002"),
        ("100000000000000000000", "100000000000000000001"),
        ("1", "1/0"),
        ("5", "-5"),
        ("5", "9" * 5000),
        ("50%", "5"),
    ],
)
def test_wrong(gold, response):
    assert judged(gold, response) == 0.0


@pytest.mark.parametrize("gold", [None, "", "many", [42]])
def test_a_gold_answer_without_a_number_is_no_ones_fault(gold):
    assert isinstance(judged(gold, "#### 42"), Skip)


def test_three_outcomes_by_its_registered_name():
    function = resolve("numeric")
    right = RewardInput("d", 1, "p", ("#### 4",), ("",), (0.0,), "terminated", {"gold": "4"})
    unanswered = RewardInput("d", 1, "p", (), (), (), "max_tokens", {"gold": "4"})
    without = RewardInput("d", 1, "p", ("#### 4",), ("",), (0.0,), "terminated", {})
    assert judge("numeric", function, right) == Reward(1.0)
    assert isinstance(judge("numeric", function, unanswered), Skip)
    assert isinstance(judge("numeric", function, without), InfraError)


def test_the_last_of_several_actions_is_judged():
    assert judged("4", "#### 5", "#### 4") == 1.0
    assert judged("4", "#### 4", "#### 5") == 0.0


@drawn(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "{}.0", "**{}**", "so: {}.", "${}"]))
def test_integers_are_read_however_they_are_written(number, form):
    quantity = number_in(form.format(number))
    if form == "${}" and number < 0:
        return  # $-5 is read as well, but is it an amount?
    assert quantity is not None
    assert quantity.value == Fraction(number)


@drawn(st.text(max_size=300))
def test_no_text_makes_it_raise(text):
    assert judged("42", text) in (0.0, 1.0)
