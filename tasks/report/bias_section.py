"""The report's section on bias: what was found in words, the numbers in tables, the distributions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasks.report.bias import (
    MEASURES,
    Comparison,
    DomainShare,
    EndRow,
    biased,
    compare,
    curves,
    domain_shares,
    findings,
)
from tasks.report.figures import Figure, distributions


@dataclass(frozen=True, slots=True)
class BiasSection:
    findings: list[str]
    found: bool  # whether one of them is a bias
    comparisons: list[dict[str, Any]]
    shares: list[DomainShare]
    figures: list[tuple[str, str, Figure]]  # name, title, figure


def bias_section(ends: Sequence[EndRow]) -> BiasSection | None:
    """None where no trajectory has ended yet."""
    if not ends:
        return None
    comparisons = compare(ends)
    certain = biased(comparisons)
    drawn = [
        (f"lengths-{measure}", f"Length in {unit}", distributions(curves(ends, measure), unit))
        for measure, unit in MEASURES.items()
        if any(comparison.measure == measure and varies(comparison) for comparison in comparisons)
    ]
    return BiasSection(
        findings=findings(comparisons),
        found=bool(certain),
        comparisons=[
            comparison_row(comparison, comparison in certain)
            for comparison in comparisons
            if varies(comparison)
        ],
        shares=domain_shares(ends),
        figures=drawn,
    )


def varies(comparison: Comparison) -> bool:
    """Whether there is more than one length to compare: episodes of one turn all have one."""
    values = {*comparison.generated_quantiles, comparison.generated_mean, comparison.accepted_mean}
    return max(values) - min(values) > 1e-9


def comparison_row(comparison: Comparison, certain: bool) -> dict[str, Any]:
    """A line of the table, as text."""
    return {
        "domain": comparison.domain,
        "measure": MEASURES[comparison.measure],
        "generated": f"{comparison.generated:,}",
        "cut short": f"{comparison.cut_short / comparison.generated:.1%}",
        "accepted": f"{comparison.accepted:,}",
        "mean": f"{comparison.generated_mean:.3g} → {comparison.accepted_mean:.3g} "
        f"({comparison.ratio - 1:+.1%})",
        "10 · 50 · 90 %": f"{_quantiles(comparison.generated_quantiles)} → "
        f"{_quantiles(comparison.accepted_quantiles)}",
        "KS": f"{comparison.distance:.3f}",
        "p": "< 0.001" if comparison.p_value <= 0.001 else f"{comparison.p_value:.3f}",
        "verdict": "bias" if certain else "no bias seen",
    }


def bias_markdown(ends: Sequence[EndRow]) -> str | None:
    """The section as a page of Markdown; None where no trajectory has ended yet."""
    section = bias_section(ends)
    if section is None:
        return None
    parts = ["### Accepted against generated", "\n".join(f"- {sentence}" for sentence in section.findings)]
    if section.comparisons:
        parts.append(_table(section.comparisons))
    shares = [
        {
            "domain": share.domain,
            "generated": f"{share.generated:,} ({share.generated_share:.1%})",
            "accepted": f"{share.accepted:,} ({share.accepted_share:.1%})",
            "wasted tokens": f"{share.wasted_tokens:,}",
            "became of them": ", ".join(f"{fate} {count:,}" for fate, count in share.fates.items()),
        }
        for share in section.shares
    ]
    return "\n\n".join([*parts, _table(shares)]) + "\n"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    header = list(rows[0])
    lines = [header, ["---"] * len(header), *([str(row[name]) for name in header] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _quantiles(values: Sequence[float]) -> str:
    return " · ".join(f"{value:.3g}" for value in values)
