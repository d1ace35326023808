"""Numeric answers, as those of GSM8K (`#### 42`): the number that a response ends in against the gold one."""

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from tasks.reward.functions import RewardInput
from tasks.reward.serverless import serverless
from tasks.reward.verifiers.answers import final_answers, gold_answer
from tasks.trajectory import Skip

_LONGEST = 400  # characters of one number
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.)])[-−+]\s?)?[$€£¥]?\s?(?P<number>{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE](?P<power>[-+]?\d{{1,3}})"
    rf"(?!\w))?(?:\s?/\s?(?P<below>{_DIGITS})(?![\d.]))?(?P<percent>\s?\\?%)?"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}")


@dataclass(frozen=True, slots=True)
class Quantity:
    value: Fraction
    is_percentage: bool


@serverless(memory_mb=256, limit_s=5)
def verify(given: RewardInput) -> float | Skip:
    """1 when the last action's number is the gold one exactly, else 0; also 0 where it has none.

    The number is looked for in what `final_answers` finds, and otherwise it is the last one of the text. An
    amount and a percentage are equal by either reading of the sign. Skip when the gold answer has no number,
    or nothing was answered.
    """
    gold = gold_answer(given)
    expected = None if gold is None else number_in(gold)
    if expected is None:
        return Skip(f"the gold answer {gold!r:.80} has no number")
    if not given.actions:
        return Skip("the question was not answered")
    answer = number_in(given.actions[-1])
    return float(answer is not None and same(expected, answer))


def number_in(text: str) -> Quantity | None:
    """The number that a text declares as its answer, or else its last one."""
    for answer in final_answers(text):
        quantity = last_number(answer) if "=" in answer else _first_number(answer)
        if quantity is not None:
            return quantity
    return last_number(text)


def last_number(text: str) -> Quantity | None:
    """The last number of a text, thousands separated or not; None when there is none."""
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def same(one: Quantity, other: Quantity) -> bool:
    if one.value == other.value:
        return True
    if one.is_percentage == other.is_percentage:
        return False
    percentage, amount = (one, other) if one.is_percentage else (other, one)
    return percentage.value / 100 == amount.value


def _first_number(text: str) -> Quantity | None:
    numbers = _numbers(text)
    return numbers[0] if numbers else None


def _numbers(text: str) -> list[Quantity]:
    plain = _FRACTION.sub(r"\1/\2", text).replace("\\!", "").replace("{,}", ",").replace("\\$", "$")
    found = (_quantity(match) for match in _NUMBER.finditer(plain))
    return [quantity for quantity in found if quantity is not None]


def _quantity(match: re.Match[str]) -> Quantity | None:
    if len(match[0]) > _LONGEST:
        return None
    value = Fraction(Decimal(match["number"].replace(",", ""))) * Fraction(10) ** int(match["power"] or 0)
    if match["below"] is not None:
        below = int(match["below"].replace(",", ""))
        if below == 0:
            return None
        value /= below
    negative = (match["sign"] or "").strip() in ("-", "−")
    return Quantity(-value if negative else value, match["percent"] is not None)
