"""The last number of an answer, for questions of the source `reasoning_gym` whose answer is a number.

Small instruct models answer in a sentence ("10 + 8 = 18."), which reasoning-gym's scorers compare whole
with the gold answer and so call wrong.
"""

import json
from decimal import Decimal, InvalidOperation

from tasks.environment.sources.numbers import last_number
from tasks.environment.sources.reasoning_gym import untag
from tasks.reward.functions import RewardInput
from tasks.trajectory import Skip


def score(given: RewardInput) -> float | Skip:
    """1 when the answer's last number is the gold answer, else 0. Skips what cannot be judged: no answer, or
    a gold answer that is no number."""
    if "entry" not in given.info or not given.actions:
        return Skip("the question was not answered")
    gold_text = untag(json.loads(given.info["entry"]))["answer"]
    try:
        gold = Decimal(str(gold_text).replace(",", ""))
    except InvalidOperation:
        return Skip(f"the gold answer {gold_text!r} is no number")
    return float(last_number(given.info["answer"]) == gold)
