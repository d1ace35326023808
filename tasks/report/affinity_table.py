"""Which pool serves which domain and why, for people: from what a run's `bindings.json` holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.bindings import BindingsRecord


@dataclass(frozen=True, slots=True)
class BoundLine:
    subject: str
    requested: str
    pool: str
    why: str


@dataclass(frozen=True, slots=True)
class AffinitySection:
    """Of the run's report."""

    summary: str
    lines: list[BoundLine]


def affinity_section(record: BindingsRecord) -> AffinitySection | None:
    """Roles and domains with their pools; None for a run on one pool, where nothing is bound."""
    advice = record.advice or {"reasons": {}}
    lines = [
        BoundLine(
            bound.subject,
            _pool(bound.requested),
            _pool(bound.pool),
            bound.reason or advice["reasons"].get(bound.subject.removeprefix("domain:"), ""),
        )
        for bound in record.bindings
    ]
    if record.advice is None and all(line.pool == "any pool" for line in lines):
        return None
    steps = [str(change["step"]) for change in record.changes]
    summary = f"The profile re-bound new trajectories after step {', '.join(steps)}. " if steps else ""
    if record.advice is not None:
        mapping = ", ".join(f"{domain} on {_pool(pool)}" for domain, pool in record.advice["mapping"].items())
        summary += (
            f"After step {record.advice['step']} it advises {mapping}: "
            f"{record.advice['gain']:.0%} less generation time than as bound before."
        )
    return AffinitySection(summary or "As the campaign asks, or what stands in for it.", lines)


def affinity_markdown(advice: Mapping[str, Any], changes: list[dict[str, Any]]) -> str:
    """The newest advice of the affinity profile (as saved), its numbers, and what was re-bound so far."""
    lines = [
        f"**Step {advice['step']}**: a step's trajectories take {_seconds(advice['makespan_s'])} of "
        f"generation as recommended, {_seconds(advice['current_s'])} as they were bound "
        f"({advice['gain']:.0%} less).",
        "",
        *_table(
            ["domain", "bound to", "recommended", "why"],
            [
                [domain, _pool(advice["bound"].get(domain)), _pool(pool), advice["reasons"][domain]]
                for domain, pool in advice["mapping"].items()
            ],
        ),
        "",
        *_table(
            ["domain", "pool", "hardware", "turns", "prefilled", "decoded", "prefill", "decode"],
            [
                [
                    row["domain"],
                    row["pool"],
                    row["hardware"],
                    f"{row['turns']:.1f}",
                    f"{row['prefilled']:.0f}",
                    f"{row['decoded']:.0f}",
                    _seconds(row["prefill_s"]),
                    _seconds(row["decode_s"]),
                ]
                for row in advice["rows"]
            ],
        ),
    ]
    if changes:
        lines += ["", "Re-bound while the run went on:", ""]
        lines += [
            f"- from step {change['step']}: "
            + ", ".join(f"{domain} on {pool}" for domain, pool in change["mapping"].items())
            for change in changes
        ]
    return "\n".join(lines) + "\n"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *cells]]


def _pool(name: str | None) -> str:
    return "any pool" if name in (None, "*") else str(name)


def _seconds(value: float | None) -> str:
    if value is None:
        return "does not fit"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} us"
