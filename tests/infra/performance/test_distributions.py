import math
import random

import pytest
from pydantic import ValidationError

from infra.performance.distributions import Distribution, constant, of_samples

_POINTS = 20_000


def _midpoints_mean(distribution: Distribution) -> float:
    """The integral of the quantile function, by the midpoint rule."""
    return math.fsum(distribution.quantile((i + 0.5) / _POINTS) for i in range(_POINTS)) / _POINTS


def test_a_plain_number_is_a_constant() -> None:
    assert Distribution.model_validate(3).quantile(0.999) == 3.0
    assert Distribution.model_validate(3) == constant(3)


@pytest.mark.parametrize(
    ("data", "u", "expected"),
    [
        ({"normal": {"mean": 10, "std": 2}}, 0.5, 10.0),
        ({"normal": {"mean": 10, "std": 2}}, 0.8413447460685429, 12.0),
        ({"normal": {"mean": 1, "std": 5}}, 0.1, 0.0),
        ({"lognormal": {"median": 100, "sigma": 0.5}}, 0.5, 100.0),
        ({"lognormal": {"median": 100, "sigma": 0.5}}, 0.9772498680518208, 100 * math.e),
        ({"lognormal": {"median": 100, "sigma": 0.5}, "most": 150}, 0.99, 150.0),
        ({"uniform": {"low": 30, "high": 50}}, 0.25, 35.0),
        ({"quantiles": [0, 10, 40]}, 0.25, 5.0),
        ({"quantiles": [0, 10, 40]}, 0.75, 25.0),
        ({"constant": 1, "tail": {"probability": 0.1, "of": 60}}, 0.89, 1.0),
        ({"constant": 1, "tail": {"probability": 0.1, "of": 60}}, 0.91, 60.0),
    ],
)
def test_draws_are_the_inverse_cdf(data: dict, u: float, expected: float) -> None:
    assert Distribution.model_validate(data).quantile(u) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "data",
    [
        {"constant": 4, "most": 3},
        {"normal": {"mean": 10, "std": 3}},
        {"normal": {"mean": 1, "std": 4}, "most": 6},
        {"lognormal": {"median": 50, "sigma": 0.8}, "most": 400},
        {"uniform": {"low": 2, "high": 12}, "most": 7},
        {"quantiles": [0, 1, 1, 8, 30], "most": 11},
        {"lognormal": {"median": 2, "sigma": 0.3}, "tail": {"probability": 0.05, "of": {"constant": 90}}},
    ],
)
def test_the_mean_is_that_of_the_draws(data: dict) -> None:
    distribution = Distribution.model_validate(data)
    assert distribution.mean == pytest.approx(_midpoints_mean(distribution), rel=2e-3)


def test_the_mean_of_a_log_normal_is_known() -> None:
    assert Distribution.model_validate({"lognormal": {"median": 10, "sigma": 1}}).mean == pytest.approx(
        10 * math.exp(0.5)
    )


def test_measured_values_keep_their_quantiles_and_mean() -> None:
    draw = random.Random(1)
    values = [draw.lognormvariate(1, 0.7) for _ in range(3000)]
    measured = of_samples(values)
    assert measured.quantile(0.5) == pytest.approx(sorted(values)[1500], rel=0.01)
    assert measured.mean == pytest.approx(math.fsum(values) / len(values), rel=0.02)
    assert of_samples([2.5]) == constant(2.5)
    with pytest.raises(ValueError, match="at least one"):
        of_samples([])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "none is given"),
        ({"constant": 1, "uniform": {"low": 0, "high": 1}}, "constant and uniform is given"),
        ({"uniform": {"low": 3, "high": 1}}, "above high"),
        ({"quantiles": [3, 1]}, "ascend"),
        ({"constant": -1}, "greater than or equal"),
        ({"gamma": 1}, "gamma"),
        ({"constant": 1, "tail": {"probability": 1.5, "of": 2}}, "less than 1"),
    ],
)
def test_what_is_no_distribution_is_refused(data: dict, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Distribution.model_validate(data)
