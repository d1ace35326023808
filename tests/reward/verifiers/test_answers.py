import json

import pytest

from tasks.reward.functions import RewardInput
from tasks.reward.verifiers.answers import final_answers, gold_answer, last_box


def given(**info: object) -> RewardInput:
    return RewardInput("d", 1, "p", ("a",), ("",), (0.0,), "terminated", dict(info))


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{42}", "42"),
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{7} and then \boxed{8 is cut off", "7"),
        (r"\fbox{x}", "x"),
        ("no box", None),
    ],
)
def test_the_last_box_that_is_closed(text, box):
    assert last_box(text) == box


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("<answer> 5 </answer> or <answer>6</answer>", ["6"]),
        ("2+40=42\n#### 42\nand much more text", ["42"]),
        ("The final answer is 7. I hope so.", ["7"]),
        ("The answer is: 3.5.", ["3.5"]),
        ("so $x=1$ and \\(y=2\\)", ["y=2"]),
        (r"the answer is \boxed{3}", ["3", r"\boxed{3}"]),
        ("nothing declared", []),
    ],
)
def test_declared_answers(text, answers):
    assert final_answers(text) == answers


def test_the_gold_answer_is_in_the_info():
    assert gold_answer(given(gold=" 42 ")) == "42"
    assert gold_answer(given(gold=0)) == "0"
    assert gold_answer(given(entry=json.dumps({"answer": "7"}))) == "7"
    for absent in (None, "", "  ", [1]):
        assert gold_answer(given(gold=absent)) is None
    with pytest.raises(KeyError, match="gold"):
        gold_answer(given())
