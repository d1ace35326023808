import json
from decimal import Decimal

import pytest

from tasks.environment.sources.numbers import last_number
from tasks.environment.sources.reasoning_gym import ReasoningGymEnvironment
from tasks.reward.functions import RewardInput, resolve
from tasks.reward.last_number import score
from tasks.trajectory import Skip


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("10 + 8 = 18.", "18"),
        ("The total is 72 clips, altogether.", "72"),
        ("It costs 1,072.50 dollars", "1072.50"),
        ("the answer is -5", "-5"),
        ("8-3", "3"),
        ("8 - 3 = 5\n", "5"),
        ("It is 5,", "5"),
        ("1, 2,3", "3"),
    ],
)
def test_the_last_number_of_a_sentence(text, number):
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "-.", ","])
def test_a_text_without_a_number_has_none(text):
    assert last_number(text) is None


def judged(says: str) -> float | Skip:
    environment = ReasoningGymEnvironment("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    prompt = environment.reset(3)
    gold = json.loads(environment.step("").info["entry"])["answer"]
    action = says.replace("GOLD", gold)
    result = environment.step(action)
    given = RewardInput("d", 3, prompt, (action,), ("",), (0.0,), "terminated", result.info)
    return resolve("tasks.reward.last_number:score")(given)


def test_a_sentence_that_ends_with_the_right_number_is_right():
    assert judged("1 and 1, so the final answer is GOLD.") == 1.0
    assert judged("<answer>GOLD</answer>") == 1.0
    assert judged("GOLD then 12345") == 0.0
    assert judged("I do not know") == 0.0


def test_what_cannot_be_judged_is_skipped():
    nothing = RewardInput("d", 3, "p", (), (), (), "max_tokens", {})
    assert isinstance(score(nothing), Skip)
    entry = {"entry": json.dumps({"answer": "red"}), "answer": "5"}
    assert isinstance(score(RewardInput("d", 3, "p", ("5",), ("",), (0.0,), "terminated", entry)), Skip)
