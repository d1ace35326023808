"""The progress line: one live line on a terminal, one printed line a step elsewhere."""

import logging
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.theme import Theme

from tasks.report.metrics import (
    Row,
    mean_staleness,
    number,
    rewards,
    staleness_histogram,
    steps_done,
    trajectories_per_second,
    wasted_share,
)


class ProgressLine:
    """Shows how far a campaign is. A context manager; leaving it ends the live line."""

    def __init__(self, steps: int, console: Console | None = None):
        self._steps = steps
        self._console = console or _log_console() or Console(stderr=True)
        self._live: Progress | None = None

    def __enter__(self) -> "ProgressLine":
        if self._console.is_interactive:
            # Prefect's console knows none of rich's own styles.
            self._console.push_theme(Theme())
            self._live = Progress(
                BarColumn(bar_width=16),
                TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True), markup=False),
                TimeElapsedColumn(),
                console=self._console,
                expand=True,
                refresh_per_second=2,
            )
            self._live.add_task("starting", total=self._steps)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._console.pop_theme()

    def update(self, row: Row) -> None:
        """Show a finished step."""
        line = describe_step(row, self._steps)
        if self._live is None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._live.update(
                self._live.task_ids[0], completed=steps_done(row), description=line, refresh=True
            )


def describe_step(row: Row, steps: int) -> str:
    """A step in one line, steps counted from 1; what the row does not hold is left out."""
    parts = [f"step {steps_done(row)}/{steps}"]
    if (version := number(row, "version")) is not None:
        parts.append(f"v{version:.0f}")
    parts += [f"{domain} {mean:.3f}" for domain, mean in rewards(row).items()]
    if (seconds := number(row, "seconds/step")) is not None:
        parts.append(f"{seconds:.1f} s")
    if (speed := trajectories_per_second(row)) is not None:
        parts.append(f"{speed:.1f} traj/s")
    if (staleness := mean_staleness(staleness_histogram(row))) is not None:
        parts.append(f"staleness {staleness:.2f}")
    if (share := wasted_share([row])) is not None:
        parts.append(f"wasted {share:.0%}")
    return " · ".join(parts)


def _log_console() -> Console | None:
    """The console that Prefect logs to: on a shared one, log lines pass above the live line."""
    for handler in logging.getLogger().handlers:
        console = getattr(handler, "console", None)
        if isinstance(console, Console):
            return console
    return None
