"""What a run was and did, in a few words and totals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.report.metrics import (
    Row,
    mean_staleness,
    number,
    reward_numbers,
    staleness_histogram,
    wasted_share,
)


def summary(options: Mapping[str, Any], name: str) -> list[str]:
    """What the run was, in a few words, from the options that are there."""
    train, model = options.get("train") or {}, options.get("model") or {}
    words = [f"run {name}"] if options.get("name") not in (None, name) else []
    if "mode" in train:
        words.append(f"mode {train['mode']}")
    if "alpha" in train:
        words.append(f"staleness bound α = {train['alpha']}")
    if kind := (train.get("algorithm") or {}).get("kind"):
        words.append(str(kind).upper())
    if "groups" in train and "group_size" in train:
        words.append(f"{train['groups']} groups of {train['group_size']}")
    if "path" in model:
        words.append(Path(model["path"]).name if model["path"] else "a model built for the campaign")
    return words


def run_facts(rows: Sequence[Row], options: Mapping[str, Any], seconds: float) -> list[tuple[str, str]]:
    """The run's totals: (label, value)."""
    planned = (options.get("train") or {}).get("steps")
    facts = [
        ("train steps", f"{len(rows)} of {planned}" if planned is not None else str(len(rows))),
        ("wall time", duration(seconds)),
    ]
    if not rows:
        return facts
    facts.append(("trajectories", _big(_total(rows, "trajectories"))))
    facts.append(("trained tokens", _big(_total(rows, "tokens/trained"))))
    facts.append(("sampled tokens", _big(_total(rows, "tokens/sampled"))))
    if (share := wasted_share(rows)) is not None:
        facts.append(("wasted tokens", f"{share:.1%}"))
    histograms = [staleness_histogram(row) for row in rows]
    longest = max(map(len, histograms))
    summed = [sum(h[age] for h in histograms if age < len(h)) for age in range(longest)]
    if (staleness := mean_staleness(summed)) is not None:
        facts.append(("mean staleness", f"{staleness:.2f}"))
    step_seconds = [value for row in rows if (value := number(row, "seconds/step")) is not None]
    if step_seconds:
        facts.append(("seconds a step", f"{sum(step_seconds) / len(step_seconds):.1f}"))
    return facts


def reward_facts(rows: Sequence[Row]) -> list[str]:
    """What reward workers and the function service did in the run, in a few words each."""
    facts = []
    last = next((found for row in reversed(rows) if (found := reward_numbers(row))), {})
    if workers := last.get("workers"):
        busy = _total(rows, "reward/busy_seconds")
        possible = sum(
            seconds / share
            for row in rows
            if (share := number(row, "reward/utilisation"))
            and (seconds := number(row, "reward/busy_seconds"))
        )
        facts.append(
            f"{_plural(workers, 'dedicated worker')} computed {_seconds(busy)} for "
            f"{_big(_total(rows, 'reward/calls'))} rewards: busy {busy / possible if possible else 0:.1%} of "
            "the time."
        )
    if billed := _total(rows, "reward/function_seconds"):
        facts.append(
            f"The function service judged {_big(_total(rows, 'reward/function_calls'))} rewards in "
            f"{_seconds(billed)} of {_plural(_total(rows, 'reward/activations'), 'activation')}, "
            f"{_total(rows, 'reward/function_busy_seconds') / billed:.1%} of them with work; "
            f"{_plural(_total(rows, 'reward/cold_starts'), 'cold start')}, at most "
            f"{last.get('concurrency_peak', 0):.0f} at a time."
        )
    return facts


def _plural(count: float, noun: str) -> str:
    return f"{count:,.0f} {noun}" + ("" if count == 1 else "s")


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else duration(seconds)


def _total(rows: Sequence[Row], key: str) -> float:
    return sum(number(row, key) or 0.0 for row in rows)


def _big(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g} {unit}"
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: `42 s`, `3 min 20 s`, `2 h 05 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
