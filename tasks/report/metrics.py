"""Names of a step's metrics, and what is computed from them. A row is one flat JSON object a train step.

step                        train step, counted from 0        version     policy version after it
time                        seconds since the run's start, at the step's end
trajectories, groups        in the batch
groups/zero_variance        groups whose rewards were all equal
groups/short                groups that lost members
reward/<domain>/mean        over the step's trajectories      reward/<domain>/count
staleness/histogram         counts of trajectories; the index is the staleness
tokens/trained, tokens/sampled
tokens/wasted/<reason>      cancelled, stale, failed, zero_variance
seconds/<stage>             time of a stage                   seconds/step  of the whole step
train/<name>                the trainer's own numbers: loss, gradient norm, entropy, weights ...
rollout/turns, rollout/tokens_per_second
episode/<domain>/turns, episode/<domain>/tokens               means over episodes
outcomes/<stop reason>      trajectories that ended so
evaluation/<domain>/mean    of an evaluation after this step, where there was one; also low, high
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def number(row: Row, key: str) -> float | None:
    """The value of a numeric metric; None when it is absent or not a number (JSON null included)."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def numbers(row: Row, prefix: str) -> dict[str, float]:
    """Numeric metrics under a prefix, by the rest of their name, in the row's order."""
    found = ((key[len(prefix) :], number(row, key)) for key in row if key.startswith(prefix))
    return {name: value for name, value in found if value is not None}


def steps_done(row: Row) -> int:
    """Train steps that are done once this one is."""
    return int(row["step"]) + 1


def domains(rows: Iterable[Row]) -> list[str]:
    """Every domain that has a reward or an episode, in order of appearance."""
    names: dict[str, None] = {}
    for row in rows:
        for key in row:
            kind, _, rest = key.partition("/")
            if kind in ("reward", "episode") and "/" in rest:
                names[rest.rpartition("/")[0]] = None
    return list(names)


def rewards(row: Row) -> dict[str, float]:
    """Mean reward by domain."""
    values = numbers(row, "reward/")
    return {name.removesuffix("/mean"): value for name, value in values.items() if name.endswith("/mean")}


def staleness_histogram(row: Row) -> list[int]:
    return [int(count) for count in row.get("staleness/histogram") or []]


def mean_staleness(histogram: Sequence[int]) -> float | None:
    total = sum(histogram)
    return sum(age * count for age, count in enumerate(histogram)) / total if total else None


def wasted_tokens(row: Row) -> dict[str, float]:
    """Sampled tokens that no train step used, by reason."""
    return numbers(row, "tokens/wasted/")


def wasted_share(rows: Iterable[Row]) -> float | None:
    """Wasted tokens over wasted and trained ones together; None when there are neither."""
    wasted = trained = 0.0
    for row in rows:
        wasted += sum(wasted_tokens(row).values())
        trained += number(row, "tokens/trained") or 0.0
    return wasted / (wasted + trained) if wasted + trained else None


def stage_seconds(row: Row) -> dict[str, float]:
    """Seconds by stage, without the whole step's."""
    return {stage: value for stage, value in numbers(row, "seconds/").items() if stage != "step"}


def trajectories_per_second(row: Row) -> float | None:
    trajectories, seconds = number(row, "trajectories"), number(row, "seconds/step")
    return trajectories / seconds if trajectories is not None and seconds else None


def smoothing_weight(points: int) -> float:
    """Weight of the past in `smooth`: a time constant of a tenth of the curve, between 3 and 25 points."""
    window = min(max(points / 10, 3), 25)
    return 1 - 2 / (window + 1)


def smooth(values: Sequence[float | None], weight: float) -> list[float | None]:
    """Exponential moving average, corrected for its start at nothing (Adam's bias correction); gaps stay."""
    average = seen = 0.0
    smoothed: list[float | None] = []
    for value in values:
        if value is None:
            smoothed.append(None)
            continue
        average = weight * average + (1 - weight) * value
        seen = weight * seen + (1 - weight)
        smoothed.append(average / seen)
    return smoothed
