"""Numbers in what a policy says."""

import re
from decimal import Decimal

_NUMBER = re.compile(r"(?<![\d.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def last_number(text: str) -> Decimal | None:
    """`The total is 1,072 clips, altogether.` has 1072; None where there is no number.

    A minus sign belongs to the number unless it follows a digit or a dot (`8-3` has 3).
    """
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None
