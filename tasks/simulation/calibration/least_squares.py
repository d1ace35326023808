"""Least squares with coefficients that are costs, so never negative. Pure."""

from collections.abc import Sequence

import numpy as np


def costs(work: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """The non-negative cost of a unit of each kind of work, by least squares of its sums against `seconds`.

    `work` has a row a measurement and a column a kind. Kinds whose cost would be negative are left out, the
    most negative first, until none is; they cost 0. Raises ValueError with fewer rows than kinds.
    """
    rows, target = np.asarray(work, float), np.asarray(seconds, float)
    if len(rows) < rows.shape[1]:
        raise ValueError(f"{len(rows)} measurements do not determine {rows.shape[1]} costs")
    kept = [kind for kind in range(rows.shape[1]) if rows[:, kind].any()]
    found = np.zeros(rows.shape[1])
    while kept:
        solution = np.linalg.lstsq(rows[:, kept], target, rcond=None)[0]
        if (solution >= 0).all():
            found[kept] = solution
            break
        del kept[int(solution.argmin())]
    return [float(cost) for cost in found]
