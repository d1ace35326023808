"""Mathematical answers: Math-Verify reads them, `equivalence` compares them.

Math-Verify's own comparison is not used where it is wrong: it takes as equal what differs by less than 1e-15
or 1e-6 in absolute terms, equations that have no solution, and an equation and its right side.
"""

from tasks.reward.functions import RewardInput
from tasks.reward.serverless import serverless
from tasks.reward.verifiers.answers import final_answers, gold_answer
from tasks.reward.verifiers.equivalence import equivalent
from tasks.reward.verifiers.expressions import Parsed, expression
from tasks.reward.verifiers.numeric import last_number
from tasks.trajectory import Skip


@serverless(memory_mb=1024, limit_s=10)
def verify(given: RewardInput) -> float | Skip:
    """1 when the last action's answer is equivalent to the gold one, else 0; also 0 where it has none.

    Skip when the gold answer cannot be read, or nothing was answered. Must run in a killable process: time is
    limited from outside.
    """
    gold = gold_answer(given)
    expected = None if gold is None else read(gold)
    if expected is None:
        return Skip(f"the gold answer {gold!r:.80} cannot be read")
    if not given.actions:
        return Skip("the question was not answered")
    answer = read(given.actions[-1])
    return float(answer is not None and equivalent(expected, answer))


def read(text: str) -> Parsed | None:
    """What a text answers: what it declares, or what it is as a whole, or its last number."""
    for answer in final_answers(text):
        parsed = expression(answer)
        if parsed is None:
            parsed = _number(answer)
        if parsed is not None:
            return parsed
    if "\n" not in text.strip():
        parsed = expression(text)
        if parsed is not None and not (isinstance(parsed, str) and len(parsed.split()) > 3):
            return parsed
    return _number(text)


def _number(text: str) -> Parsed | None:
    quantity = last_number(text)
    if quantity is None:
        return None
    value = rf"\frac{{{quantity.value.numerator}}}{{{quantity.value.denominator}}}"
    return expression(value + r"\%" if quantity.is_percentage else value)
