"""A campaign's artifacts in the Prefect dashboard. Their keys are stable, so each has a history.

    <campaign>-progress     how far it is, updated in place
    <campaign>-step         the last step: rewards, staleness, wasted tokens, stage times
    <campaign>-rewards      rewards by domain over the whole run
    <campaign>-bias         accepted against generated trajectories, by length and domain
    <campaign>-affinity     which pool serves which domain and why, with a profile
    <campaign>-plan         what was predicted before the start, at the end beside what was measured
    <campaign>-evaluation   held-out rewards, untrained against trained
    <campaign>-report       where the run's report is

Showing must never stop a run: what the API answers or does not answer costs a warning and at most
`LIMIT_S` seconds, and after `FAILURES` failures in a row nothing more is tried.
"""

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)

from tasks.report.bias_section import bias_markdown
from tasks.report.evaluation_table import evaluation_table
from tasks.report.metrics import (
    Row,
    context_wasted,
    domains,
    histogram,
    mean_staleness,
    number,
    reward_numbers,
    rewards,
    stage_seconds,
    staleness_histogram,
    steps_done,
    wasted_by_domain,
    wasted_share,
    wasted_tokens,
)
from tasks.report.progress import describe_step

logger = logging.getLogger(__name__)

LIMIT_S = 10.0
FAILURES = 3


class CampaignArtifacts:
    """Writes the artifacts of one campaign's run. To be awaited inside its flow run, which then owns them."""

    def __init__(self, campaign: str, steps: int):
        self._prefix = campaign.lower().replace("_", "-")
        self._steps = steps
        self._progress: UUID | None = None
        self._failures = 0

    async def step(self, row: Row) -> None:
        """Show a finished step: two writes."""
        done = 100.0 * steps_done(row) / self._steps if self._steps else 100.0
        await self._show_progress(min(done, 100.0), describe_step(row, self._steps))
        await self._try(
            acreate_markdown_artifact(step_markdown(row, self._steps), key=f"{self._prefix}-step")
        )

    async def affinity(self, markdown: str) -> None:
        """Show what the affinity profile advises: a page of `tasks.report.affinity_table`."""
        await self._try(acreate_markdown_artifact(markdown, key=f"{self._prefix}-affinity"))

    async def plan(self, markdown: str) -> None:
        """Show what the campaign's plan predicts: a page of `tasks.report.plan_section`."""
        await self._try(acreate_markdown_artifact(markdown, key=f"{self._prefix}-plan"))

    async def evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Show held-out results, of the shape that `RunFiles.write_evaluation` returns."""
        if not evaluation.get("rows"):
            return
        await self._try(
            acreate_table_artifact(
                evaluation_table(evaluation),
                key=f"{self._prefix}-evaluation",
                description="Mean held-out reward with its 95 % Wilson interval, untrained and trained.",
            )
        )

    async def finish(
        self, rows: Sequence[Row], report: Path | None, ends: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Show the run as a whole: rewards by domain, bias, and where its report is."""
        await self._try(
            acreate_table_artifact(
                rewards_table(rows),
                key=f"{self._prefix}-rewards",
                description="Mean reward of a step's trajectories, by domain.",
            )
        )
        bias = await asyncio.to_thread(bias_markdown, ends)
        if bias is not None:
            await self._try(acreate_markdown_artifact(bias, key=f"{self._prefix}-bias"))
        if report is not None:
            markdown = f"The report of this run, one HTML file:\n\n`{report}`\n"
            await self._try(acreate_markdown_artifact(markdown, key=f"{self._prefix}-report"))

    async def _show_progress(self, percent: float, description: str) -> None:
        if self._progress is None:
            self._progress = await self._try(
                acreate_progress_artifact(percent, f"{self._prefix}-progress", description)
            )
        else:
            await self._try(aupdate_progress_artifact(self._progress, percent, description))

    async def _try(self, write: Awaitable[UUID]) -> UUID | None:
        if self._failures >= FAILURES:
            if asyncio.iscoroutine(write):
                write.close()
            return None
        try:
            async with asyncio.timeout(LIMIT_S):
                written = await write
        except Exception as error:
            self._failures += 1
            end = "; no more are tried in this run" if self._failures == FAILURES else ""
            logger.warning("a Prefect artifact was not written (%s: %s)%s", type(error).__name__, error, end)
            return None
        self._failures = 0
        return written


def step_markdown(row: Row, steps: int) -> str:
    """A finished step as a page of tables; what the row does not hold is left out."""
    parts = [f"**{describe_step(row, steps)}**"]
    if means := rewards(row):
        lines = [
            [domain, f"{mean:.4f}", _count(number(row, f"reward/{domain}/count"))]
            for domain, mean in means.items()
        ]
        parts.append(_section("Rewards", ["domain", "mean", "trajectories"], lines))
    if sum(ages := staleness_histogram(row)):
        lines = [[str(age), str(count), _bar(count, max(ages))] for age, count in enumerate(ages)]
        title = f"Staleness, mean {mean_staleness(ages):.2f} versions"
        parts.append(_section(title, ["versions", "trajectories", ""], lines))
    if sum(token_ages := histogram(row, "staleness/tokens")):
        most = max(token_ages)
        lines = [[str(age), _count(count), _bar(count, most)] for age, count in enumerate(token_ages)]
        mixed = number(row, "staleness/mixed_share") or 0.0
        title = f"Age of tokens, mean {mean_staleness(token_ages):.2f}; {mixed:.0%} of several versions"
        parts.append(_section(title, ["versions", "tokens", ""], lines))
    if wasted := wasted_tokens(row):
        share = wasted_share([row]) or 0.0
        lines = [[reason, _count(tokens)] for reason, tokens in wasted.items()]
        lines += [[f"of {domain}", _count(tokens)] for domain, tokens in wasted_by_domain(row).items()]
        lines += [[f"context {reason}", _count(tokens)] for reason, tokens in context_wasted(row).items()]
        parts.append(_section(f"Wasted tokens, {share:.1%}", ["reason", "tokens"], lines))
    if used := reward_numbers(row):
        lines = [[name.replace("_", " "), f"{value:.4g}"] for name, value in used.items()]
        parts.append(_section("Reward workers", ["", ""], lines))
    if stages := stage_seconds(row):
        longest = max(stages.values())
        lines = [[stage, f"{value:.2f}", _bar(value, longest)] for stage, value in stages.items()]
        parts.append(_section("Stage times", ["stage", "seconds", ""], lines))
    return "\n\n".join(parts) + "\n"


def rewards_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A line a domain: the first and the last tenth of its steps, its best step."""
    table = []
    for domain in domains(rows):
        points = [
            (int(row["step"]), mean)
            for row in rows
            if (mean := number(row, f"reward/{domain}/mean")) is not None
        ]
        if not points:
            continue
        tenth = max(len(points) // 10, 1)
        best_step, best = max(points, key=lambda point: point[1])
        table.append(
            {
                "domain": domain,
                "steps": len(points),
                "first tenth": round(sum(mean for _, mean in points[:tenth]) / tenth, 4),
                "last tenth": round(sum(mean for _, mean in points[-tenth:]) / tenth, 4),
                "best": round(best, 4),
                "best step": best_step,
            }
        )
    return table


def _section(title: str, header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in line] for line in lines)]
    return f"### {title}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _bar(value: float, largest: float, width: int = 24) -> str:
    return "█" * round(width * value / largest) if largest > 0 else ""
