"""TensorBoard event files, written with the `tensorboard` package alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tasks.report.metrics import Row, histogram, number

HISTOGRAMS = {
    "staleness/histogram": "staleness",
    "staleness/tokens": "staleness_of_tokens",
    "staleness/turns": "staleness_of_turns",
}
"""Metrics that are counts by age, and their tags."""


class TensorBoardLog:
    """Writes a run's metrics for TensorBoard. A context manager; leaving it closes the file.

    `started_at` is the Unix time of the run's start, to which a row's `time` is added: TensorBoard shows
    dates.
    `resumed_step` hides what an earlier process wrote of this and later steps.
    """

    def __init__(self, folder: Path, *, started_at: float = 0.0, resumed_step: int | None = None):
        self._started_at = started_at
        self._writer = EventFileWriter(str(folder))
        if resumed_step is not None:
            restart = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=started_at, step=resumed_step, session_log=restart))

    def __enter__(self) -> "TensorBoardLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, row: Row) -> None:
        """Every numeric key of a step's metrics as a scalar, ages as histograms."""
        values = list(_scalars(row))
        for key, tag in HISTOGRAMS.items():
            if counts := histogram(row, key):
                values.append(Summary.Value(tag=tag, histo=_count_histogram(counts)))
        wall_time = self._started_at + (number(row, "time") or 0.0)
        self._writer.add_event(
            Event(wall_time=wall_time, step=int(row["step"]), summary=Summary(value=values))
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _scalars(row: Row) -> Iterable[Summary.Value]:
    for key in row:
        value = number(row, key)
        if value is not None and key not in ("step", "time"):
            yield Summary.Value(tag=key, simple_value=value)


def _count_histogram(counts: Sequence[int]) -> HistogramProto:
    """Counts of the integers 0, 1, 2 ...; a bucket reaches half a unit to both sides of its integer."""
    present = [value for value, count in enumerate(counts) if count]
    return HistogramProto(
        min=min(present, default=0),
        max=max(present, default=0),
        num=sum(counts),
        sum=sum(value * count for value, count in enumerate(counts)),
        sum_squares=sum(value * value * count for value, count in enumerate(counts)),
        # The first bucket of the format reaches from minus infinity to its limit.
        bucket_limit=[value + 0.5 for value in range(len(counts))],
        bucket=counts,
    )
