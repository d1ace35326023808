"""Text to mathematics, by Math-Verify's LaTeX parser. Nothing is evaluated as Python.

Call it only in a process that may be killed: what a policy writes can keep a parser busy for ever.
"""

import logging
import re
from typing import Any

from math_verify import LatexExtractionConfig, parse

Parsed = Any  # a sympy object, or casefolded words
_LONGEST = 2000  # characters of one answer
_LATEX = re.compile(r"[\\{}_]")
_WORD = re.compile(r"[A-Za-zÀ-ÿ]{2,}")
_FUNCTIONS = ["arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "sec", "csc", "cot"]
_FUNCTIONS += ["exp", "sqrt", "log", "ln"]
_NAMES = {"pi": r"\pi", "infinity": r"\infty", "inf": r"\infty", "oo": r"\infty", "theta": r"\theta"}
_SIGNS = {"<=": r"\le ", ">=": r"\ge ", "≤": r"\le ", "≥": r"\ge ", "∞": r"\infty ", "π": r"\pi "}
_SIGNS |= {"−": "-", "×": r"\cdot ", "·": r"\cdot ", "÷": "/", "∪": r"\cup "}
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off


def expression(text: str) -> Parsed | None:
    """What an answer says, LaTeX or plain (`-1 + exp(16)`); None when it cannot be read.

    Words alone are casefolded text; words beside mathematics are units or phrases, and None here.
    """
    text = text.strip().strip("$").strip().rstrip(".").strip()
    if not text or len(text) > _LONGEST:
        return None
    words = _words(text)
    if words is not None:
        return words
    if _LATEX.search(text):
        return _from_latex(text)
    latex = plain_to_latex(text)
    return None if latex is None else _from_latex(latex)


def plain_to_latex(text: str) -> str | None:
    """Plain mathematics as LaTeX; None when it has words that are no function or constant."""
    text = text.replace("**", "^")
    text = re.sub(r"(?<=\d)[eE]([-+]?\d{1,3})(?!\w)", r" * 10^(\1)", text)
    text = re.sub(r"^(-?\d+) +(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
    for sign, latex in _SIGNS.items():
        text = text.replace(sign, latex)
    for word in set(_WORD.findall(re.sub(r"\\[A-Za-z]+", " ", text))):
        if word not in _FUNCTIONS and word.lower() not in _NAMES:
            return None
    for name, latex in _NAMES.items():
        alone = rf"(?<![\\A-Za-z]){name}(?![A-Za-z])"
        text = re.sub(alone, latex.replace("\\", r"\\") + " ", text, flags=re.IGNORECASE)
    text = _calls_to_latex(text)
    text = re.sub(r"\^\s*(-?\d+(?:\.\d+)?)", r"^{\1}", text)
    return text.replace("*", r" \cdot ")


def _calls_to_latex(text: str) -> str:
    """`sqrt(x)` and `2^(x)` with the braces of LaTeX; other functions with their backslash."""
    opening = re.search(rf"(?<![\\A-Za-z])({'|'.join(_FUNCTIONS)})\s*\(|\^\s*\(", text)
    if opening is None:
        return text
    depth = 1
    for position in range(opening.end(), len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            inner = _calls_to_latex(text[opening.end() : position])
            match opening[1]:
                case None:
                    call = f"^{{{inner}}}"
                case "exp":
                    call = f"e^{{{inner}}}"
                case "sqrt":
                    call = rf"\sqrt{{{inner}}}"
                case name:
                    call = rf"\{name}({inner})"
            return text[: opening.start()] + call + _calls_to_latex(text[position + 1 :])
    return text


def _words(text: str) -> str | None:
    """The text when it is words alone, as in `\\text{Monday}`."""
    plain = _TEXT.sub(r" \1 ", text).strip()
    bare = plain.strip("() ")
    if _WORD.search(bare) and re.fullmatch(r"[A-Za-zÀ-ÿ' ,-]+", bare):
        if all(word in _FUNCTIONS or word.lower() in _NAMES for word in _WORD.findall(bare)):
            return None
        return " ".join(bare.casefold().split())
    if _TEXT.search(text) and re.fullmatch(r"[A-Za-z]", bare):
        return bare.casefold()  # a choice: \text{(B)}
    return None


def _from_latex(latex: str) -> Parsed | None:
    found = parse(
        rf"\boxed{{{latex}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # its signal.alarm works on main threads only; the process is killed instead
    )
    return found[0] if found else None
