"""Names of a step's metrics, and what is computed from them. A row is one flat JSON object a train step.

step                        train step, counted from 0        version     policy version after it
time                        seconds since the run's start, at the step's end
trajectories, groups        in the batch
groups/zero_variance        groups whose rewards were all equal
groups/short                groups that lost members
reward/<domain>/mean        over the step's trajectories      reward/<domain>/count
staleness/histogram         counts of trajectories; the index is the staleness
staleness/tokens            counts of trained tokens by their own age
staleness/turns             counts of trained turns by their oldest token's age
staleness/mean, staleness/token_mean, staleness/turn_mean
staleness/mixed_share       of the trajectories, those that more than one policy version sampled
tokens/trained, tokens/sampled
tokens/wasted/<reason>      sampled and not trained: cancelled, stale, failed, zero_variance
waste/<domain>/<reason>     the same by domain
context/trained             context of what was trained, each token once; context/wasted/<reason> of the rest
tokens/recomputed           context whose KV was rebuilt under new weights
seconds/<stage>             time of a stage                   seconds/step  of the whole step
train/<name>                the trainer's own numbers: loss, gradient norm, entropy, weights ...
rollout/turns, rollout/tokens_per_second
episode/<domain>/turns, episode/<domain>/tokens               means over episodes
outcomes/<stop reason>      trajectories that ended so
reward/latency_p50, reward/latency_p99    seconds that an episode waits for its reward
reward/utilisation          of dedicated reward workers: seconds computed over workers x wall time
reward/workers, reward/calls, reward/busy_seconds    of these
reward/function_utilisation of a function service: seconds with work over seconds of activations
reward/function_calls, reward/function_seconds, reward/activations, reward/cold_starts,
reward/cold_start_seconds, reward/lost_activations, reward/retries, reward/concurrency_peak
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


def histogram(row: Row, key: str) -> list[int]:
    """Counts by index; empty where the row has none."""
    return [int(count) for count in row.get(key) or []]


def staleness_histogram(row: Row) -> list[int]:
    """Of trajectories."""
    return histogram(row, "staleness/histogram")


def mean_staleness(histogram: Sequence[int]) -> float | None:
    total = sum(histogram)
    return sum(age * count for age, count in enumerate(histogram)) / total if total else None


def wasted_tokens(row: Row) -> dict[str, float]:
    """Sampled tokens that no train step used, by reason."""
    return numbers(row, "tokens/wasted/")


def wasted_by_domain(row: Row) -> dict[str, float]:
    """The same by domain, whatever the reason."""
    summed: dict[str, float] = {}
    for name, tokens in numbers(row, "waste/").items():
        domain = name.rpartition("/")[0]
        summed[domain] = summed.get(domain, 0.0) + tokens
    return summed


def context_wasted(row: Row) -> dict[str, float]:
    """Tokens prefilled for nothing by reason, and those prefilled again under new weights, "recomputed"."""
    wasted = numbers(row, "context/wasted/")
    recomputed = number(row, "tokens/recomputed")
    return wasted if recomputed is None else {**wasted, "recomputed": recomputed}


def reward_numbers(row: Row) -> dict[str, float]:
    """What rewards took, `reward/<name>`, without the domains' means and counts."""
    return {name: value for name, value in numbers(row, "reward/").items() if "/" not in name}


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
