"""Distributions of durations and lengths, as a file describes them: drawn by inverse CDF from uniforms.

Written as one key and its parameters, `{lognormal: {median: 900, sigma: 0.7}}`, with `most` and `tail` beside
it; a plain number is a constant. Pure: whoever draws brings the uniform, so that the same uniforms give the
same work wherever it is run.
"""

import math
from statistics import NormalDist
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from infra.config import Config

_STANDARD = NormalDist()


class Normal(Config):
    """Normal, cut at 0: what would be below 0 is 0."""

    mean: float
    std: NonNegativeFloat

    def quantile(self, u: float) -> float:
        return self.mean + self.std * _STANDARD.inv_cdf(u)

    def excess(self, above: float) -> float:
        """E[max(X - above, 0)], by Bachelier's formula."""
        if self.std == 0:
            return max(self.mean - above, 0.0)
        z = (self.mean - above) / self.std
        return (self.mean - above) * _STANDARD.cdf(z) + self.std * _STANDARD.pdf(z)


class LogNormal(Config):
    """The logarithm is normal with mean log(`median`) and standard deviation `sigma`."""

    median: PositiveFloat
    sigma: NonNegativeFloat

    def quantile(self, u: float) -> float:
        return self.median * math.exp(self.sigma * _STANDARD.inv_cdf(u))

    def excess(self, above: float) -> float:
        """E[max(X - above, 0)], by Black's formula."""
        whole = self.median * math.exp(self.sigma**2 / 2)
        if above <= 0:
            return whole - above
        if self.sigma == 0:
            return max(self.median - above, 0.0)
        z = math.log(self.median / above) / self.sigma
        return whole * _STANDARD.cdf(z + self.sigma) - above * _STANDARD.cdf(z)


class Uniform(Config):
    low: NonNegativeFloat
    high: NonNegativeFloat

    @model_validator(mode="after")
    def _ordered(self) -> "Uniform":
        if self.low > self.high:
            raise ValueError(f"uniform: low ({self.low:g}) is above high ({self.high:g})")
        return self

    def quantile(self, u: float) -> float:
        return self.low + (self.high - self.low) * u

    def excess(self, above: float) -> float:
        """E[max(X - above, 0)]."""
        if above <= self.low:
            return (self.low + self.high) / 2 - above
        if above >= self.high:
            return 0.0
        return (self.high - above) ** 2 / (2 * (self.high - self.low))


class Tail(Config):
    """With this probability a draw is one of another distribution instead."""

    probability: Annotated[float, Field(gt=0, lt=1)]
    of: "Distribution"


_KINDS = ("constant", "normal", "lognormal", "uniform", "quantiles")


class Distribution(Config):
    """Exactly one of `constant`, `normal`, `lognormal`, `uniform` and `quantiles`. Never negative."""

    constant: NonNegativeFloat | None = None
    normal: Normal | None = None
    lognormal: LogNormal | None = None
    uniform: Uniform | None = None
    quantiles: Annotated[tuple[NonNegativeFloat, ...], Field(min_length=2)] | None = None
    """Measured: the values at shares 0, 1/n, 2/n ... 1 of the sample, ascending; straight lines between."""
    most: PositiveFloat | None = None
    """What would be above it is this much. It does not hold for `tail`, which has its own."""
    tail: Tail | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain_numbers(cls, data: Any) -> Any:
        if isinstance(data, int | float) and not isinstance(data, bool):
            return {"constant": data}
        return data

    @model_validator(mode="after")
    def _one_kind(self) -> "Distribution":
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            named = " and ".join(given) if given else "none"
            raise ValueError(f"a distribution is one of {', '.join(_KINDS)}, and {named} is given")
        if self.quantiles is not None and list(self.quantiles) != sorted(self.quantiles):
            raise ValueError("quantiles must ascend")
        return self

    def quantile(self, u: float) -> float:
        """The draw of a uniform `u`, 0 < u < 1.

        Without a tail this is the quantile function. With one, the upper `probability` of the uniforms are
        the tail's own, so it ascends as long as the tail lies above the rest.
        """
        if self.tail is not None:
            body = 1.0 - self.tail.probability
            if u >= body:
                return self.tail.of.quantile((u - body) / self.tail.probability or 1e-12)
            u /= body
        value = self._body_quantile(u)
        if value < 0.0:
            return 0.0
        return value if self.most is None else min(value, self.most)

    @property
    def mean(self) -> float:
        """In closed form, cuts and tail included."""
        body = self._excess(0.0) - (0.0 if self.most is None else self._excess(self.most))
        if self.tail is None:
            return body
        return (1.0 - self.tail.probability) * body + self.tail.probability * self.tail.of.mean

    @property
    def is_zero(self) -> bool:
        """Whether every draw is 0."""
        return self.constant == 0 and self.tail is None

    def _body_quantile(self, u: float) -> float:
        if self.constant is not None:
            return self.constant
        if self.quantiles is not None:
            place = u * (len(self.quantiles) - 1)
            index = min(int(place), len(self.quantiles) - 2)
            below, above = self.quantiles[index : index + 2]
            return below + (above - below) * (place - index)
        family = self.normal or self.lognormal or self.uniform
        assert family is not None
        return family.quantile(u)

    def _excess(self, above: float) -> float:
        if self.constant is not None:
            return max(self.constant - above, 0.0)
        if self.quantiles is not None:
            steps = zip(self.quantiles, self.quantiles[1:], strict=False)
            pieces = [Uniform(low=low, high=high).excess(above) for low, high in steps]
            return math.fsum(pieces) / len(pieces)
        family = self.normal or self.lognormal or self.uniform
        assert family is not None
        return family.excess(above)


def constant(value: float) -> Distribution:
    return Distribution(constant=value)


def of_samples(values: list[float], points: int = 101) -> Distribution:
    """The distribution of measured values, by `points` quantiles with straight lines between.

    Raises ValueError without any value.
    """
    if not values:
        raise ValueError("a distribution is measured on at least one value")
    ordered = sorted(values)
    if ordered[0] == ordered[-1]:
        return constant(ordered[0])
    picked = []
    for point in range(points):
        place = point / (points - 1) * (len(ordered) - 1)
        index = min(int(place), len(ordered) - 2)
        picked.append(ordered[index] + (ordered[index + 1] - ordered[index]) * (place - index))
    return Distribution(quantiles=tuple(picked))
