"""A row of the benchmark: ours against a reference, measured in one run."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    ours: float
    reference: float
    ratio: float  # what `target` bounds
    target: str  # for example ">= 0.9"
    met: bool
    how: str  # what was measured, on what, how often


def at_least(name: str, ours: float, reference: float, target: float, how: str) -> Row:
    """A row whose ratio ours / reference should be `target` or more."""
    ratio = ours / reference
    return Row(name, ours, reference, ratio, f">= {target}", ratio >= target, how)


def at_most(name: str, ours: float, reference: float, target: float, how: str) -> Row:
    """A row whose ratio ours / reference should be `target` or less."""
    ratio = ours / reference
    return Row(name, ours, reference, ratio, f"<= {target}", ratio <= target, how)


def table(rows: list[Row]) -> str:
    lines = [("row", "ours", "reference", "ratio", "target", "met")]
    lines += [
        (
            row.name,
            f"{row.ours:.4g}",
            f"{row.reference:.4g}",
            f"{row.ratio:.3f}",
            row.target,
            "yes" if row.met else "NO",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )


def write(rows: list[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n")
