"""How sure a mean reward is: an interval that holds for rewards of a known range."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

NORMAL_QUANTILE_95 = 1.959963984540054
"""Two-sided 95 % quantile of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean reward with its 95 % interval, in the reward's own unit. The mean of no episode is NaN."""

    mean: float
    low: float
    high: float
    episodes: int

    def overlaps(self, other: "Interval") -> bool:
        return self.low <= other.high and other.low <= self.high


def mean_interval(rewards: Sequence[float], reward_range: tuple[float, float]) -> Interval:
    """The 95 % Wilson score interval of a mean reward.

    Rewards are rescaled from `reward_range` = (lowest, highest possible reward) to [0, 1] and their mean
    taken as a proportion (Wilson, "Probable inference, the law of succession, and statistical inference",
    1927). For rewards of 0 and 1 this is the usual interval; any other distribution on [0, 1] with the same
    mean has a smaller variance, so there it is conservative. It stays within the range and never has length
    0, not even when all rewards are equal. Of no rewards nothing is known: the interval is the whole range.

    Raises ValueError on an empty range, and on a reward outside of it.
    """
    lowest, highest = reward_range
    if not lowest < highest:
        raise ValueError(f"reward_range must be (lowest, highest), not ({lowest}, {highest})")
    outside = [reward for reward in rewards if not lowest <= reward <= highest]
    if outside:
        raise ValueError(
            f"reward {outside[0]} lies outside [{lowest}, {highest}]: change the domain's reward_range"
        )
    episodes = len(rewards)
    if episodes == 0:
        return Interval(math.nan, float(lowest), float(highest), 0)
    width = highest - lowest
    mean = math.fsum(rewards) / episodes
    share = (mean - lowest) / width
    z_squared_over_n = NORMAL_QUANTILE_95**2 / episodes
    centre = (share + z_squared_over_n / 2) / (1 + z_squared_over_n)
    half = (
        NORMAL_QUANTILE_95
        * math.sqrt(share * (1 - share) / episodes + z_squared_over_n / (4 * episodes))
        / (1 + z_squared_over_n)
    )
    # At a mean of 0 or 1 the exact bound is the range's end; rounding must not put it beyond the mean.
    low = min(max(centre - half, 0.0), share)
    high = max(min(centre + half, 1.0), share)
    return Interval(mean, lowest + width * low, lowest + width * high, episodes)


def separated(first: Interval, second: Interval) -> bool:
    """The two 95 % intervals do not overlap: a difference that chance hardly explains (p well below 0.05)."""
    return not first.overlaps(second)
