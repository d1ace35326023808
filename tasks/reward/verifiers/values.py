"""Numbers and expressions of variables: whether their values are the same."""

from collections.abc import Sequence
from typing import Any

from math_verify import verify
from sympy import Expr, Float, I, Mul, Number, Rational, Symbol, UnevaluatedExpr

USABLE_POINTS = 3
"""Points at which expressions have to agree, at least, to be the same."""
POINT_DIGITS = 40

_DECIMAL_ABSOLUTE = Rational(1, 10**6)  # of decimals, as Math-Verify rounds them
_DECIMAL_RELATIVE = Rational(2, 10**6)
_DIGITS = 1000  # to which exact numbers are told apart
_SAME_TO = Rational(1, 10**300)
_SAME_AT_A_POINT = Rational(1, 10**25)
_POINTS = 8
_PERCENT = UnevaluatedExpr(Rational(1, 100))


def same_expressions(a: Expr, b: Expr) -> bool:
    """Whether two expressions have the same value, for all values of their variables where they have any.

    Exact numbers are told apart to 300 digits relative to their size, decimals to 2e-6 relative and 1e-6
    absolute. What has no values at the points is left to Math-Verify.
    """
    a, b = _with_unit(a, b), _with_unit(b, a)
    names = {symbol.name for symbol in a.free_symbols | b.free_symbols if isinstance(symbol, Symbol)}
    if not names:
        return any(_same_numbers(x, y) for x, y in _readings(a, b))
    if a == b:
        return True
    if {symbol.name for symbol in a.free_symbols} != {symbol.name for symbol in b.free_symbols}:
        a, b = a.doit().simplify(), b.doit().simplify()
        if {symbol.name for symbol in a.free_symbols} != {symbol.name for symbol in b.free_symbols}:
            return False
    usable = 0
    for point in points(sorted(names)):
        x, y = at(a, point), at(b, point)
        if x is None and y is None:
            continue
        if x is None or y is None:
            return False
        imaginary = [value.has(I) for value in (x, y)]
        if all(imaginary) and not (a.has(I) or b.has(I)) and "i" not in names:
            continue  # roots and logarithms of what is negative: nobody meant those
        if not same_values(x, y, decimal=a.has(Float) or b.has(Float)):
            return False
        usable += 1
    if usable >= USABLE_POINTS:
        return True
    return bool(verify(a, b, timeout_seconds=None))


def _with_unit(value: Expr, other: Expr) -> Expr:
    """The letter i as the imaginary unit, where the other side has no such letter."""
    if any(symbol.name == "i" for symbol in other.free_symbols):
        return value
    return value.subs({symbol: I for symbol in value.free_symbols if symbol.name == "i"})


def _readings(a: Expr, b: Expr) -> list[tuple[Expr, Expr]]:
    """A percentage beside a plain number may mean its hundredth or the number before the sign."""
    readings = [(a.doit(), b.doit())]
    for one, other in ((a, b), (b, a)):
        if _is_percentage(one) and not _is_percentage(other):
            readings.append((Mul(*[part for part in one.args if part != _PERCENT]).doit(), other.doit()))
    return readings


def _is_percentage(value: Expr) -> bool:
    return isinstance(value, Mul) and _PERCENT in value.args


def _same_numbers(a: Expr, b: Expr) -> bool:
    if isinstance(a, Rational) and isinstance(b, Rational):
        return bool(a == b)
    if a.has(Float) or b.has(Float):
        x, y = a.evalf(POINT_DIGITS), b.evalf(POINT_DIGITS)
        return is_value(x) and is_value(y) and same_values(x, y, decimal=True, absolute=True)
    if a == b:
        return True
    difference = (a - b).evalf(20, maxn=_DIGITS)
    size = a.evalf(20, maxn=_DIGITS)
    if not is_value(difference) or not is_value(size):
        return bool(verify(a, b, timeout_seconds=None))
    return bool(abs(difference) <= _SAME_TO * abs(size))


def same_values(x: Expr, y: Expr, *, decimal: bool, absolute: bool = False) -> bool:
    """Whether two finite values agree relative to their size, as decimals or exactly but for rounding."""
    size = max(abs(x), abs(y))
    difference = abs(x - y)
    if absolute and difference > _DECIMAL_ABSOLUTE:
        return False
    return bool(difference <= (_DECIMAL_RELATIVE if decimal else _SAME_AT_A_POINT) * size)


def points(names: Sequence[str]) -> list[dict[str, Rational]]:
    """Fixed values of variables: the first points are positive throughout, the others of mixed signs."""
    primes = [13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59]
    found = []
    for number in range(_POINTS):
        point = {}
        for index, name in enumerate(names):
            over = primes[(3 * number + 5 * index) % len(primes)]
            under = primes[(7 * number + index + 1) % len(primes)] + 2
            negative = number >= _POINTS // 2 and (number + index) % 2 == 0
            point[name] = Rational(-over if negative else over, under)
        found.append(point)
    return found


def at(value: Expr, point: dict[str, Rational]) -> Expr | None:
    """The value at a point; None where it has none. The letter i is the imaginary unit."""
    of_symbols = {
        symbol: I if symbol.name == "i" else point[symbol.name]
        for symbol in value.free_symbols
        if isinstance(symbol, Symbol)
    }
    try:
        found = value.subs(of_symbols).doit().evalf(POINT_DIGITS)
    except (TypeError, ValueError, ArithmeticError, NotImplementedError, AttributeError):
        return None
    return found if is_value(found) else None


def is_value(value: Any) -> bool:
    """A finite number, real or complex."""
    return (
        isinstance(value, Expr)
        and bool(value.is_number)
        and all(isinstance(part, Number) and part.is_finite for part in value.as_real_imag())
    )
