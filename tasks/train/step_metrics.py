"""One row of a run's metrics: what a train step was given, what it cost, what became of the rest. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from tasks.train.manifests import BatchManifest
from tasks.train.staleness import staleness


def step_row(
    manifest: BatchManifest,
    *,
    time: float,
    stage_seconds: Mapping[str, float],
    step_seconds: float,
    trainer: Mapping[str, float],
    alpha: int,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Flat keys, as `tasks.report` documents them. `time` is seconds since the run began.

    `more` is what no other argument has, taken as it is. Raises ValueError for an impossible version stamp.
    """
    entries = manifest.trajectories
    by_domain: dict[str, list[Any]] = defaultdict(list)
    for entry in entries:
        by_domain[entry.domain].append(entry)
    ages = Counter(staleness(manifest.step, entry.oldest_version) for entry in entries)
    row: dict[str, Any] = {
        "step": manifest.step,
        "version": manifest.step + 1,
        "time": time,
        "trajectories": len(entries),
        "groups": len({entry.group for entry in entries}),
        "staleness/histogram": [ages.get(age, 0) for age in range(max([alpha, *ages]) + 1)],
        "staleness/mean": sum(age * count for age, count in ages.items()) / max(1, len(entries)),
        "tokens/trained": sum(entry.sampled_tokens for entry in entries),
        "seconds/step": step_seconds,
        "rollout/trajectories_per_second": len(entries) / step_seconds if step_seconds else 0.0,
    }
    for domain, members in sorted(by_domain.items()):
        row[f"reward/{domain}/mean"] = sum(entry.reward for entry in members) / len(members)
        row[f"reward/{domain}/count"] = len(members)
        row[f"episode/{domain}/turns"] = sum(entry.turns for entry in members) / len(members)
        row[f"episode/{domain}/tokens"] = sum(entry.tokens for entry in members) / len(members)
    row |= manifest.counts
    row["rollout/tokens_per_second"] = (
        manifest.counts.get("tokens/sampled", 0) / step_seconds if step_seconds else 0.0
    )
    row |= {f"seconds/{stage}": seconds for stage, seconds in stage_seconds.items()}
    return row | dict(more or {}) | dict(trainer)
