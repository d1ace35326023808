"""Held-out results as a table of text, untrained against trained."""

from collections.abc import Mapping
from typing import Any

HEADER = ("domain", "untrained", "trained", "episodes", "intervals")


def evaluation_table(evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line a domain of what `RunFiles.write_evaluation` returns. Means with their 95 % intervals."""
    return [
        dict(
            zip(
                HEADER,
                (
                    row["domain"],
                    _interval(row["untrained"]),
                    _interval(row["trained"]),
                    (row["trained"] or row["untrained"])["episodes"],
                    _comparison(row),
                ),
                strict=True,
            )
        )
        for row in evaluation.get("rows", [])
    ]


def format_evaluation(evaluation: Mapping[str, Any]) -> str:
    """The table for a terminal, columns aligned."""
    lines = [HEADER, *(tuple(map(str, line.values())) for line in evaluation_table(evaluation))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _interval(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "-"
    mean = "no episode" if result["mean"] is None else f"{result['mean']:.3f}"
    return f"{mean} [{result['low']:.3f}, {result['high']:.3f}]"


def _comparison(row: Mapping[str, Any]) -> str:
    """`better` and `worse` only where the intervals have no point in common."""
    if row["untrained"] is None or row["trained"] is None:
        return "-"
    if not row["separated"]:
        return "overlap"
    return "apart: better" if row["trained"]["mean"] > row["untrained"]["mean"] else "apart: worse"
