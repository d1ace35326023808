"""A run's folder: what it holds, how it is written while the run lives, and how it is read back.

    campaign.yaml      the campaign, every option written out
    metrics.jsonl      one flat JSON object a train step (names: `tasks.report.metrics`)
    ends.jsonl         one trajectory a line that was trained or dropped (`tasks.train.ends.End.row`)
    timeline.jsonl     one span of work a line
    evaluation.json    held-out rewards of the untrained and the trained policy
    bindings.json      which pools serve the roles and domains, and why (`tasks.bindings`)
    logs/  tensorboard/  report.html

Lines are appended whole and reach the operating system at once, so a killed process leaves at most one torn
last line, which readers pass over and the next append removes.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from tasks.report.intervals import Interval, separated


class RunFilesDamaged(ValueError):
    """A line of a run's file, other than a torn last one, is not a JSON object."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of work. `start` and `end` are seconds since the run's start."""

    lane: str  # who worked: trainer, control, engine, evaluation, weights
    stage: str
    step: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class RunFiles:
    """The files of one run. One writer at a time; any number of readers."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.campaign_file = self.folder / "campaign.yaml"
        self.metrics_file = self.folder / "metrics.jsonl"
        self.ends_file = self.folder / "ends.jsonl"
        self.timeline_file = self.folder / "timeline.jsonl"
        self.evaluation_file = self.folder / "evaluation.json"
        self.report_file = self.folder / "report.html"
        self.logs = self.folder / "logs"
        self.tensorboard = self.folder / "tensorboard"

    def create(self) -> "RunFiles":
        """Make the folders that do not exist yet."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.tensorboard.mkdir(exist_ok=True)
        return self

    def write_campaign(self, text: str) -> None:
        replace_file(self.campaign_file, text)

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Numbers that JSON cannot say (NaN, infinities) are written as null."""
        _append_lines(self.metrics_file, [row])

    def append_ends(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Trajectories whose fate was decided with one batch; each row has its "step"."""
        _append_lines(self.ends_file, rows)

    def append_span(self, lane: str, stage: str, step: int, start: float, end: float) -> None:
        """Raises ValueError when the span ends before it starts."""
        if end < start:
            raise ValueError(f"span {stage!r} of step {step} ends at {end}, before its start at {start}")
        _append_lines(self.timeline_file, [asdict(Span(lane, stage, step, start, end))])

    def write_evaluation(
        self, untrained: Mapping[str, Interval], trained: Mapping[str, Interval], **settings: Any
    ) -> dict[str, Any]:
        """Write held-out results by domain, both policies on the same episodes.

        Either may be missing so far, and is then null in its row. `settings`, for example the sampling
        temperature, are kept beside the rows. Returns what was written.
        """
        rows = []
        for domain in dict.fromkeys([*untrained, *trained]):
            before, after = untrained.get(domain), trained.get(domain)
            rows.append(
                {
                    "domain": domain,
                    "untrained": asdict(before) if before else None,
                    "trained": asdict(after) if after else None,
                    "separated": bool(before and after and separated(before, after)),
                }
            )
        evaluation: dict[str, Any] = _plain({"rows": rows, **settings})
        replace_file(self.evaluation_file, json.dumps(evaluation, indent=2, allow_nan=False))
        return evaluation

    def read_campaign(self) -> str | None:
        return self.campaign_file.read_text() if self.campaign_file.exists() else None

    def read_metrics(self) -> list[dict[str, Any]]:
        """Raises `RunFilesDamaged`."""
        return _read_lines(self.metrics_file)

    def read_ends(self) -> list[dict[str, Any]]:
        """Raises `RunFilesDamaged`."""
        return _read_lines(self.ends_file)

    def read_spans(self) -> list[Span]:
        """Raises `RunFilesDamaged`."""
        return [Span(**line) for line in _read_lines(self.timeline_file)]

    def read_evaluation(self) -> dict[str, Any] | None:
        if not self.evaluation_file.exists():
            return None
        evaluation: dict[str, Any] = json.loads(self.evaluation_file.read_text())
        return evaluation

    def read_untrained(self) -> dict[str, Interval] | None:
        """Held-out results of the untrained policy by domain; None where there is none yet."""
        rows = (self.read_evaluation() or {}).get("rows", [])
        results = {row["domain"]: row["untrained"] for row in rows if row["untrained"]}
        return {
            domain: Interval(**{**result, "mean": math.nan if result["mean"] is None else result["mean"]})
            for domain, result in results.items()
        } or None

    def last_time(self) -> float:
        """Seconds since the run's start that are on record; 0 when nothing is."""
        ends = [span.end for span in self.read_spans()]
        return max([*ends, *(float(row.get("time") or 0.0) for row in self.read_metrics())], default=0.0)

    def drop_from_step(self, step: int) -> float:
        """Forget metrics and spans of `step` and later ones, which will run again.

        Returns where the run's time goes on: the last second on record, of forgotten steps included, because
        that time was spent.
        """
        seconds = self.last_time()
        _keep_lines(self.metrics_file, lambda line: int(line["step"]) < step)
        _keep_lines(self.timeline_file, lambda line: int(line["step"]) < step)
        return seconds

    def drop_ends_from_step(self, step: int) -> None:
        """Forget ends that were decided with the batch of `step` or a later one, none of which is committed.

        Those of batches that are committed stay, also where they are trained again: no batch decides them
        a second time.
        """
        _keep_lines(self.ends_file, lambda line: int(line["step"]) < step)


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")  # hidden, so that no upload takes it for a file of the run
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def _append_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(_plain(record), allow_nan=False) + "\n" for record in records).encode()
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(lines)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    *whole, _torn = path.read_bytes().split(b"\n")
    records: list[dict[str, Any]] = []
    for index, line in enumerate(whole, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise RunFilesDamaged(f"{path}, line {index}: {error}") from None
        if not isinstance(record, dict):
            raise RunFilesDamaged(f"{path}, line {index}: not a JSON object")
        records.append(record)
    return records


def _keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    if path.exists():
        kept = [json.dumps(line) + "\n" for line in _read_lines(path) if wanted(line)]
        replace_file(path, "".join(kept))


def _plain(value: Any) -> Any:
    """JSON values of Python and NumPy ones; what is not finite becomes null."""
    match value:
        case None | bool() | str():
            return value
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case Integral():
            return int(value)
        case Real():
            return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"a run's files hold numbers, text, lists and mappings, not {type(value).__name__}")
