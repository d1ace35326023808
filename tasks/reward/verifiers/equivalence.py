"""Whether two parsed answers say the same.

Numbers are compared relative to their size, exact ones to hundreds of digits. Expressions with variables are
compared by value at fixed points, of both signs; equations by whether their sides differ by a constant
factor. So an answer is never right because a difference was small or because nothing solves it.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from latex2sympy2_extended.logic import And as ParsedAnd
from math_verify import verify
from sympy import (
    And,
    Basic,
    Eq,
    Expr,
    FiniteSet,
    Float,
    Interval,
    MatrixBase,
    Mul,
    Ne,
    Set,
    StrictGreaterThan,
    StrictLessThan,
    Symbol,
    Tuple,
    Union,
    fraction,
    together,
)
from sympy.core.function import AppliedUndef
from sympy.core.relational import GreaterThan, LessThan, Relational

from tasks.reward.verifiers.values import (
    POINT_DIGITS,
    USABLE_POINTS,
    at,
    points,
    same_expressions,
    same_values,
)


def equivalent(gold: Any, answer: Any) -> bool:
    """Compare what `expressions.expression` returned. May take for ever: call it where it can be killed."""
    if isinstance(gold, str) or isinstance(answer, str):
        return _words(gold) == _words(answer) is not None
    if _is_relation(gold) and _is_relation(answer):
        return _same_relations(_without_chain(gold), _without_chain(answer))
    if _is_relation(answer):
        value = _value_of(answer)
        if value is None and isinstance(gold, Set) and _members(gold) is None:
            value = _solutions(answer)
        return value is not None and equivalent(gold, value)
    if _is_relation(gold):
        value = _value_of(gold)
        if value is None and isinstance(answer, Set) and not isinstance(answer, FiniteSet):
            value = _solutions(gold)
        return value is not None and equivalent(value, answer)
    if isinstance(gold, Set | Tuple) or isinstance(answer, Set | Tuple):
        return _same_sets(gold, answer)
    if isinstance(gold, MatrixBase) or isinstance(answer, MatrixBase):
        return _same_matrices(gold, answer)
    if isinstance(gold, Expr) and isinstance(answer, Expr):
        return same_expressions(gold, answer)
    return bool(verify(gold, answer, timeout_seconds=None))


def _words(parsed: Any) -> str | None:
    """Text, or the one name that an expression is: \\text{x} is x."""
    if isinstance(parsed, str):
        return parsed
    return parsed.name.casefold() if isinstance(parsed, Symbol) else None


# ---- relations


def _is_relation(value: Any) -> bool:
    return isinstance(value, Relational | And | ParsedAnd)


def _parts(relation: Any) -> list[Any]:
    if isinstance(relation, And | ParsedAnd):
        return list(getattr(relation, "_unsorted_args", relation.args))
    return [relation]


def _names_a_value(side: Any) -> bool:
    """A left side such as x, f(x) or area: what stands for a value, not one to be solved for."""
    if isinstance(side, Symbol | AppliedUndef):
        return True
    return isinstance(side, Mul) and all(isinstance(part, Symbol) for part in side.args)


def _value_of(relation: Any) -> Any:
    """The value that an equation gives to a name, or that a true sum ends in (2 + 3 = 5); else None."""
    parts = _parts(relation)
    if not all(isinstance(part, Eq) for part in parts):
        return None
    first, last = parts[0], parts[-1]
    if _names_a_value(first.lhs):
        return last.rhs
    if not first.lhs.free_symbols and isinstance(last.rhs, Expr) and equivalent(first.lhs, last.rhs):
        return last.rhs
    return None


def _without_chain(relation: Any) -> Any:
    """A = pi r^2 = 9 pi as A = 9 pi."""
    parts = _parts(relation)
    chained = all(isinstance(part, Eq) for part in parts) and all(
        before.rhs == after.lhs for before, after in itertools.pairwise(parts)
    )
    if len(parts) > 1 and chained and _names_a_value(parts[0].lhs):
        return Eq(parts[0].lhs, parts[-1].rhs, evaluate=False)
    return relation


def _same_relations(gold: Any, answer: Any) -> bool:
    return _paired(_parts(gold), _parts(answer), _same_relation) or _same_solutions(gold, answer)


def _same_relation(a: Any, b: Any) -> bool:
    if not isinstance(a, Relational) or not isinstance(b, Relational):
        return bool(a == b)
    if a == b:
        return True
    if isinstance(a.rhs, Set) or isinstance(b.rhs, Set):
        return bool(a.lhs == b.lhs) and equivalent(a.rhs, b.rhs)
    kind = _kind(a)
    if kind != _kind(b) or not all(isinstance(side, Expr) for side in (*a.args, *b.args)):
        return False
    factor = _constant_factor(_difference(a), _difference(b))
    return factor is not None and (kind in ("=", "≠") or bool(factor > 0))


def _kind(relation: Relational) -> str:
    kinds = {Eq: "=", Ne: "≠", StrictLessThan: "<", StrictGreaterThan: "<", LessThan: "≤", GreaterThan: "≤"}
    return next((sign for kind, sign in kinds.items() if isinstance(relation, kind)), "?")


def _difference(relation: Relational) -> Expr:
    """What the relation compares with 0: `difference = 0`, `difference < 0` or `difference <= 0`."""
    if isinstance(relation, StrictGreaterThan | GreaterThan):
        return relation.rhs - relation.lhs
    difference = relation.lhs - relation.rhs
    return fraction(together(difference))[0] if isinstance(relation, Eq | Ne) else difference


def _constant_factor(a: Expr, b: Expr) -> Expr | None:
    """c such that a = c b at every point, c not 0; None when there is none."""
    names = {symbol.name for symbol in a.free_symbols}
    if not names or names != {symbol.name for symbol in b.free_symbols}:
        return None
    factors = []
    for point in points(sorted(names)):
        x, y = at(a, point), at(b, point)
        if x is not None and y is not None and x != 0 and y != 0:
            factors.append((x / y).evalf(POINT_DIGITS))
    if len(factors) < USABLE_POINTS or not all(factor.is_real for factor in factors):
        return None
    decimal = a.has(Float) or b.has(Float)
    same = all(same_values(factors[0], factor, decimal=decimal) for factor in factors[1:])
    return factors[0] if same else None


def _same_solutions(gold: Any, answer: Any) -> bool:
    """Of inequalities in one variable: x^2 < 4 is -2 < x < 2. No solution on both sides proves nothing."""
    if any(isinstance(part, Eq) for part in (*_parts(gold), *_parts(answer))):
        return False
    ours, theirs = _solutions(gold), _solutions(answer)
    if ours is None or theirs is None or ours.is_empty is not False:
        return False
    return {symbol.name for symbol in gold.free_symbols} == {
        symbol.name for symbol in answer.free_symbols
    } and _same_sets(ours, theirs)


def _solutions(relation: Any) -> Set | None:
    if len(relation.free_symbols) != 1:
        return None
    try:
        found: Set = And(*_parts(relation)).as_set()
    except (TypeError, ValueError, NotImplementedError, AttributeError):
        return None
    return found


# ---- sets, tuples and matrices


def _same_sets(gold: Any, answer: Any) -> bool:
    if isinstance(gold, Interval) and isinstance(answer, Interval):
        ends = gold.left_open == answer.left_open and gold.right_open == answer.right_open
        return bool(ends) and equivalent(gold.start, answer.start) and equivalent(gold.end, answer.end)
    if isinstance(gold, Union) and isinstance(answer, Union):
        return _paired(gold.args, answer.args, equivalent)
    ours, theirs = _members(gold), _members(answer)
    if ours is None or theirs is None:
        return bool(gold == answer)
    if isinstance(gold, FiniteSet):
        return _paired(ours, theirs, equivalent)
    return len(ours) == len(theirs) and all(map(equivalent, ours, theirs))


def _members(value: Any) -> list[Any] | None:
    """In the order written. An open interval is written like a point; anything else alone is one member."""
    match value:
        case FiniteSet():
            return list(getattr(value, "_unsorted_args", value.args))
        case Tuple():
            return list(value.args)
        case Interval() if value.is_open:
            return [value.start, value.end]
        case Set():
            return None
        case _:
            return [value]


def _paired(ours: Sequence[Any], theirs: Sequence[Any], same: Any) -> bool:
    """Whether each of ours is one of theirs, and none is used twice."""
    left = list(theirs)
    if len(ours) != len(left):
        return False
    for one in ours:
        found = next((index for index, other in enumerate(left) if same(one, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _same_matrices(gold: Any, answer: Any) -> bool:
    one, other = (
        value.doit() if isinstance(value, Basic | MatrixBase) else value for value in (gold, answer)
    )
    if not isinstance(one, MatrixBase) or not isinstance(other, MatrixBase) or one.shape != other.shape:
        return False
    return all(map(equivalent, one.flat(), other.flat()))
