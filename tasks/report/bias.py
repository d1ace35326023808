"""Whether the trajectories that are trained are a fair sample of those that were generated. Pure.

A batch that takes the first N ends favours short and quick work (RollArt's weak spot; tinker-cookbook #822).
Accepted are the trained trajectories; generated are all. Those that were cancelled, aborted or failed have no
final length: theirs so far is a lower bound, so the generated distribution is Kaplan and Meier's estimate,
which takes them as cut at random for their length within a group. Distance is Kolmogorov and Smirnov's over
the lengths that ended by themselves. Its p-value is a bootstrap's over groups (members of a group are alike,
and accepted ones are part of the generated): how often resampling alone moves the difference of the two
distributions by as much. Holm's method corrects for the number of comparisons.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.report.survival import Floats, mean_length, means_beyond, quantile, survival
from tasks.train.ends import Fate

MEASURES = {"sampled_tokens": "sampled tokens", "turns": "turns", "seconds": "seconds"}
QUANTILES = (0.1, 0.5, 0.9)
LEVEL = 0.01
"""Corrected p-value below which a difference is called one."""
LEAST_SHIFT, LEAST_DISTANCE = 0.02, 0.05
"""A difference of less than both, in means and in distance, is not worth a word, however certain."""
FEWEST = 20
"""Accepted trajectories of a domain below which nothing is said."""
RESAMPLES = 999

_LENGTHS = 200  # more different ones are put in so many classes of equal size
_BLOCKS = 1000  # more groups are resampled in so many runs of neighbours
_REMEDIES = {
    Fate.CANCELLED: "lower train.redundancy.members or train.redundancy.groups",
    Fate.STALE: "raise train.alpha",
    Fate.ZERO_VARIANCE: "change train.algorithm.zero_variance from refill",
    Fate.FAILED: "mend what fails, or raise its limit in the domain's options",
}

EndRow = Mapping[str, Any]
"""A line of `ends.jsonl`, as `tasks.train.ends.End.row` makes it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Accepted against generated trajectories of one domain, by one measure of length."""

    domain: str
    measure: str
    generated: int
    accepted: int
    cut_short: int  # of the generated, those of which only a lower bound is known
    generated_quantiles: tuple[float, ...]  # at QUANTILES
    accepted_quantiles: tuple[float, ...]
    generated_mean: float
    accepted_mean: float
    distance: float
    p_value: float  # as it is, for this comparison alone
    cause: Fate | None  # whose absence shifts the mean most; None where nothing is absent

    @property
    def ratio(self) -> float:
        """Of the means, accepted to generated; 1 where both are 0."""
        return self.accepted_mean / self.generated_mean if self.generated_mean else 1.0


@dataclass(frozen=True, slots=True)
class Curve:
    """Two cumulative distributions over the same ascending lengths."""

    domain: str
    measure: str
    lengths: list[float]
    generated: list[float]
    accepted: list[float]


@dataclass(frozen=True, slots=True)
class DomainShare:
    """How a domain's trajectories fared. Shares are of all domains together."""

    domain: str
    generated: int
    accepted: int
    generated_share: float
    accepted_share: float
    fates: dict[str, int]
    wasted_tokens: int  # sampled and not trained


def compare(rows: Sequence[EndRow], *, resamples: int = RESAMPLES, seed: int = 0) -> list[Comparison]:
    """By domain and measure; domains with fewer than FEWEST accepted trajectories are left out."""
    dice = np.random.default_rng(seed)
    comparisons = []
    for domain, mine in _by_domain(rows).items():
        accepted = sum(row["fate"] == Fate.TRAINED for row in mine)
        if accepted < FEWEST:
            continue
        weights: Floats | None = None
        for measure in MEASURES:
            sample = _Sample.of(mine, measure)
            if weights is None:
                blocks = sample.complete.shape[0]
                weights = dice.multinomial(blocks, np.full(blocks, 1 / blocks), resamples).astype(np.float64)
            comparisons.append(_comparison(domain, measure, mine, sample, weights))
    return comparisons


def curves(rows: Sequence[EndRow], measure: str) -> list[Curve]:
    """The distributions that `compare` compares, as far as they are known, a curve a domain whose lengths
    differ."""
    drawn = []
    for domain, mine in _by_domain(rows).items():
        if sum(row["fate"] == Fate.TRAINED for row in mine) < FEWEST:
            continue
        sample = _Sample.of(mine, measure)
        if len(sample.lengths) < 2:
            continue
        accepted, generated = sample.distributions(np.ones((1, sample.complete.shape[0])))
        lengths, *shares = (
            row[: sample.known].tolist() for row in (sample.lengths, generated[0], accepted[0])
        )
        drawn.append(Curve(domain, measure, lengths, *shares))
    return drawn


def domain_shares(rows: Sequence[EndRow]) -> list[DomainShare]:
    """In order of the domains' names."""
    accepted_of_all = sum(row["fate"] == Fate.TRAINED for row in rows)
    shares = []
    for domain, mine in _by_domain(rows).items():
        fates = Counter(str(row["fate"]) for row in mine)
        shares.append(
            DomainShare(
                domain=domain,
                generated=len(mine),
                accepted=fates[Fate.TRAINED],
                generated_share=len(mine) / len(rows),
                accepted_share=fates[Fate.TRAINED] / accepted_of_all if accepted_of_all else 0.0,
                fates={fate.value: fates[fate] for fate in Fate if fates[fate]},
                wasted_tokens=sum(row["sampled_tokens"] for row in mine if row["fate"] != Fate.TRAINED),
            )
        )
    return shares


def biased(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Those whose difference is certain at LEVEL, by Holm's method over all, and large enough to matter."""
    certain = []
    for rank, comparison in enumerate(sorted(comparisons, key=lambda comparison: comparison.p_value)):
        if comparison.p_value * (len(comparisons) - rank) >= LEVEL:
            break
        if abs(comparison.ratio - 1) >= LEAST_SHIFT or comparison.distance >= LEAST_DISTANCE:
            certain.append(comparison)
    return sorted(certain, key=lambda comparison: (comparison.domain, comparison.measure))


def findings(comparisons: Sequence[Comparison]) -> list[str]:
    """What was found, a plain sentence a finding, with the options to change; at least one sentence."""
    if not comparisons:
        return [f"Nothing can be said yet: no domain has {FEWEST} trained trajectories."]
    found = biased(comparisons)
    if not found:
        total = sum(c.generated for c in comparisons if c.measure == comparisons[0].measure)
        return [
            f"No bias seen: over {total:,} generated trajectories, those that were trained are as long as "
            f"those that were generated, in every domain, by {', '.join(MEASURES.values())}."
        ]
    alike: defaultdict[tuple[str, bool, Fate | None], list[Comparison]] = defaultdict(list)
    for comparison in found:
        alike[comparison.domain, comparison.ratio < 1, comparison.cause].append(comparison)
    return [_sentence(*key, comparisons) for key, comparisons in alike.items()]


def _sentence(domain: str, shorter: bool, cause: Fate | None, found: Sequence[Comparison]) -> str:
    shifts = ", ".join(
        f"{abs(comparison.ratio - 1):.0%} in {MEASURES[comparison.measure]} (KS {comparison.distance:.2f}, "
        f"p {'< 0.001' if comparison.p_value <= 0.001 else f'= {comparison.p_value:.3f}'})"
        for comparison in found
    )
    remedy = ""
    if cause is not None:
        missing = cause.value.replace("_", "-")
        remedy = f"; mostly {missing} ones are missing: {_REMEDIES[cause]}"
    return (
        f"Accepted trajectories of {domain} are {'shorter' if shorter else 'longer'} than generated ones, by "
        f"{shifts}{remedy}."
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    """Counts of trajectories by block of groups (G) and class of length (L)."""

    lengths: Floats  # [L], ascending
    classes: NDArray[np.intp]  # of each trajectory, [N]
    complete: Floats  # [G, L]
    cut: Floats  # [G, L]
    accepted: Floats  # [G, L], a part of `complete`

    @classmethod
    def of(cls, rows: Sequence[EndRow], measure: str) -> "_Sample":
        values = np.array([row[measure] for row in rows], np.float64)
        lengths, classes = _classes(values)
        _, groups = np.unique([row["group"] for row in rows], return_inverse=True)
        count = int(groups.max()) + 1
        blocks = groups * min(count, _BLOCKS) // count
        trained = np.array([row["fate"] == Fate.TRAINED for row in rows])
        cut = np.array([bool(row["cut_short"]) for row in rows])

        def counted(chosen: NDArray[np.bool_]) -> Floats:
            table = np.zeros((min(count, _BLOCKS), len(lengths)))
            np.add.at(table, (blocks[chosen], classes[chosen]), 1.0)
            return table

        return cls(lengths, classes, counted(~cut), counted(cut), counted(trained))

    def distributions(self, weights: Floats) -> tuple[Floats, Floats]:
        """Cumulative shares [B, L] of accepted and of generated ones, with blocks weighted by [B, G]."""
        accepted = np.cumsum(weights @ self.accepted, axis=-1)
        generated = 1.0 - survival(weights @ self.complete, weights @ self.cut)
        return accepted / np.maximum(accepted[:, -1:], 1.0), generated

    @property
    def known(self) -> int:
        """Classes up to the greatest length that ended by itself: beyond, the estimate says nothing."""
        return int(np.flatnonzero(self.complete.sum(axis=0)).max()) + 1


def _comparison(
    domain: str, measure: str, rows: Sequence[EndRow], sample: _Sample, weights: Floats
) -> Comparison:
    accepted, generated = sample.distributions(np.ones((1, sample.complete.shape[0])))
    known = sample.known
    difference = (accepted - generated)[:, :known]
    distance = float(np.abs(difference).max())
    resampled_accepted, resampled_generated = sample.distributions(weights)
    moved = np.abs((resampled_accepted - resampled_generated)[:, :known] - difference).max(axis=-1)
    # Equal distributions are equal in every resample as well: rounding is no reason to call them apart.
    reached = int((moved >= distance - 1e-12).sum())
    lengths, shares = sample.lengths, 1.0 - generated[0]
    accepted_mean = float(mean_length(lengths, 1.0 - accepted[0]))
    generated_mean = float(mean_length(lengths, shares))
    return Comparison(
        domain=domain,
        measure=measure,
        generated=len(rows),
        accepted=int(sample.accepted.sum()),
        cut_short=int(sample.cut.sum()),
        generated_quantiles=tuple(quantile(lengths, shares, level) for level in QUANTILES),
        accepted_quantiles=tuple(quantile(lengths, 1.0 - accepted[0], level) for level in QUANTILES),
        generated_mean=generated_mean,
        accepted_mean=accepted_mean,
        distance=distance,
        p_value=(1 + reached) / (1 + len(weights)),
        cause=_cause(rows, sample, shares, accepted_mean, generated_mean),
    )


def _cause(
    rows: Sequence[EndRow], sample: _Sample, shares: Floats, accepted_mean: float, generated_mean: float
) -> Fate | None:
    """The fate whose trajectories, at their expected lengths, lie farthest from the accepted ones' mean on
    the side of the generated ones'."""
    beyond = means_beyond(sample.lengths, shares)
    pull: defaultdict[Fate, float] = defaultdict(float)
    for row, place in zip(rows, sample.classes, strict=True):
        fate = Fate(row["fate"])
        if fate is not Fate.TRAINED:
            length = beyond[place] if row["cut_short"] else sample.lengths[place]
            pull[fate] += float(length) - accepted_mean
    if not pull:
        return None
    side = 1.0 if generated_mean >= accepted_mean else -1.0
    return max(pull, key=lambda fate: side * pull[fate])


def _classes(values: Floats) -> tuple[Floats, NDArray[np.intp]]:
    """Ascending lengths, and the index of each value's; many different ones by the mean of their class."""
    lengths, classes = np.unique(values, return_inverse=True)
    if len(lengths) <= _LENGTHS:
        return lengths, classes
    edges = np.unique(np.quantile(values, np.linspace(0, 1, _LENGTHS + 1)[1:-1]))
    classes = np.searchsorted(edges, values)
    used, classes = np.unique(classes, return_inverse=True)
    counts = np.bincount(classes, minlength=len(used))
    return np.bincount(classes, values, minlength=len(used)) / counts, classes


def _by_domain(rows: Iterable[EndRow]) -> dict[str, list[EndRow]]:
    found: defaultdict[str, list[EndRow]] = defaultdict(list)
    for row in rows:
        found[str(row["domain"])].append(row)
    return dict(sorted(found.items()))
