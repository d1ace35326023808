"""Distribution of lengths of which some are only known to be at least so long. Pure.

Kaplan and Meier, "Nonparametric estimation from incomplete observations", JASA 53 (1958): what survives each
length is the product of the shares that did not end there. Past the greatest complete length the estimate is
brought to nothing at the greatest length seen (Efron, "The two sample problem with censored data", 1967), so
the mean is a finite lower bound where that one was cut short.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def survival(complete: Floats, cut: Floats) -> Floats:
    """Share longer than each of L ascending lengths; shapes [..., L] of counts, and of the result.

    `complete` ended at that length, `cut` were cut short there and would have gone on. Those that are cut at
    a length were still at risk of ending there.
    """
    at_risk = np.cumsum((complete + cut)[..., ::-1], axis=-1)[..., ::-1]
    ended = np.divide(complete, at_risk, out=np.zeros_like(at_risk), where=at_risk > 0)
    shares: Floats = np.cumprod(1.0 - ended, axis=-1, dtype=np.float64)
    shares[..., -1] = 0.0
    return shares


def mean_length(lengths: Floats, shares: Floats) -> Floats:
    """Mean of the distribution that `survival` gave; `lengths` [L], `shares` [..., L] -> [...]."""
    before = np.concatenate([np.ones((*shares.shape[:-1], 1)), shares[..., :-1]], axis=-1)
    mean: Floats = ((before - shares) * lengths).sum(axis=-1)
    return mean


def quantile(lengths: Floats, shares: Floats, level: float) -> float:
    """The least length that at least `level` of the distribution do not exceed; `shares` [L]."""
    # A hair's breadth for the rounding of a product of shares.
    return float(lengths[int(np.argmax(1.0 - shares >= level - 1e-12))])


def means_beyond(lengths: Floats, shares: Floats) -> Floats:
    """Mean of what is longer than each length, [L]; past the last, that length itself."""
    before = np.concatenate([[1.0], shares[:-1]])
    weight = before - shares
    tail_weight = np.cumsum(weight[::-1])[::-1] - weight
    tail_sum = np.cumsum((weight * lengths)[::-1])[::-1] - weight * lengths
    return np.divide(tail_sum, tail_weight, out=lengths.copy(), where=tail_weight > 1e-12)
