"""Where the answer is: in what the policy wrote, and in what the environment left for the verifier.

A verifier's gold answer is `info["gold"]` of the environment's last step: text or a number. Domains of the
source `reasoning_gym` have it in their entry, so verifiers judge them too.
"""

import json
import re
from typing import Any

from tasks.reward.functions import RewardInput

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]*([^\n#]*\S)")
_SAID = re.compile(
    r"\b(?:final answer|answer|result|solution)\b[ \t]*(?:is|=|:)+[ \t:]*((?:[^\n.;]|\.(?=\d)|;(?=\S))+)",
    re.IGNORECASE,
)
_MATH = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+?)(?<!\\)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_BOXES = re.compile(r"\\(?:boxed|fbox)\s*\{")


def gold_answer(given: RewardInput) -> str | None:
    """The right answer as text; None when there is none to compare with.

    Raises KeyError when the environment leaves no gold answer at all, which is its fault and no policy's.
    """
    if "gold" in given.info:
        gold: Any = given.info["gold"]
    elif "entry" in given.info:
        gold = json.loads(given.info["entry"]).get("answer")
    else:
        raise KeyError('the environment leaves no info["gold"], which this verifier needs')
    if gold is None or isinstance(gold, dict | list):
        return None
    return str(gold).strip() or None


def final_answers(text: str) -> list[str]:
    """What the text may mean as its answer, the plainest declaration first.

    That is the last of each: a `\\boxed{}` that is closed, `<answer>` tags, a line behind `####`, "the answer
    is …", and LaTeX mathematics.
    """
    found = []
    if (box := last_box(text)) is not None:
        found.append(box)
    for pattern in (_TAGGED, _HASHES, _SAID, _MATH):
        matches = pattern.findall(text)
        if matches:
            last = matches[-1]
            found.append(last if isinstance(last, str) else next(part for part in last if part))
    return [answer.strip() for answer in found if answer.strip()]


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{}` whose braces are closed."""
    for opening in reversed(list(_BOXES.finditer(text))):
        depth = 1
        for position in range(opening.end(), len(text)):
            if text[position - 1] == "\\":
                continue
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[opening.end() : position]
    return None
