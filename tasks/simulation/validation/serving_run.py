"""A recorded run of a serving engine: who asked for what and when, and when it came."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from infra.performance.parallel import Parallel
from tasks.simulation.calibration.trace import TraceError

FIELDS = ("input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts")


@dataclass(frozen=True, slots=True)
class Requests:
    """Arrays by request, in the order of arrival. Seconds count from the first arrival."""

    arrival: np.ndarray
    context: np.ndarray  # tokens
    output: np.ndarray  # tokens

    def __len__(self) -> int:
        return len(self.arrival)


@dataclass(frozen=True, slots=True)
class Served:
    """When requests had their first and their last token, in seconds from the first arrival."""

    requests: Requests
    first: np.ndarray
    last: np.ndarray

    @property
    def makespan(self) -> float:
        return float(self.last.max())

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the makespan."""
        return float(self.requests.output.sum()) / self.makespan

    @property
    def latency(self) -> np.ndarray:
        """From arrival to the last token."""
        return np.asarray(self.last - self.requests.arrival)

    @property
    def ttft(self) -> np.ndarray:
        """From arrival to the first token, waiting included."""
        return np.asarray(self.first - self.requests.arrival)

    @property
    def tpot(self) -> np.ndarray:
        """Between tokens, the request's mean."""
        return np.asarray((self.last - self.first) / np.maximum(1, self.requests.output - 1))


@dataclass(frozen=True, slots=True)
class ServingRun:
    """A run as LLMServingSim's `bench run` records it."""

    hardware: str
    model: str
    parallel: Parallel
    max_running: int  # of a data parallel rank, as are the next two
    max_batch_tokens: int
    kv_tokens: int | None  # None where the run does not say
    served: Served

    @classmethod
    def load(cls, folder: Path) -> "ServingRun":
        """Raises `TraceError` where a request lacks a time or a length, or its times are out of order."""
        options, described = _read_json(folder / "meta.json"), _read_json(folder / "config.json")
        try:
            engine, count = options["engine_kwargs"], options["num_requests"]
            running, budget = engine["max_num_seqs"], engine["max_num_batched_tokens"]
            tensor, data = engine["tensor_parallel_size"], engine["data_parallel_size"]
            expert = tensor * data if engine["enable_expert_parallel"] else 1
            model = str(engine["model"])
            device = str(described["nodes"][0]["instances"][0]["hardware"])
        except (KeyError, IndexError, TypeError) as error:
            raise TraceError(f"{folder}: meta.json or config.json lacks {error}") from None
        file = folder / "requests.jsonl"
        rows = [_row(line, file, number) for number, line in enumerate(_lines(file), 1)]
        if len(rows) != count:
            raise TraceError(f"{file} has {len(rows)} of {count} requests")
        rows.sort(key=lambda row: row["arrival_time"])
        kv = options.get("kv_cache", {}).get("num_kv_tokens")
        parallel = Parallel(tensor=tensor, expert=expert, data=data)
        return cls(device, model, parallel, running, budget, kv, _served(rows))


def _served(rows: Sequence[dict[str, float]]) -> Served:
    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows])

    # Arrivals are of the wall clock, all else of one monotonic clock: the first request, which finds the
    # engine idle, is queued as it arrives.
    arrival, begin = column("arrival_time") - rows[0]["arrival_time"], rows[0]["queued_ts"]
    requests = Requests(arrival, column("input_toks").astype(int), column("output_toks").astype(int))
    return Served(requests, column("first_token_ts") - begin, column("last_token_ts") - begin)


def _row(line: str, file: Path, number: int) -> dict[str, float]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{file}, line {number}: {error}") from None
    lacking = [name for name in FIELDS if not _is_number(row.get(name))]
    if lacking:
        raise TraceError(f"{file}, line {number}: there is no {', '.join(lacking)}")
    if not 0 < row["queued_ts"] <= row["first_token_ts"] <= row["last_token_ts"]:
        raise TraceError(
            f"{file}, line {number}: queued at {row['queued_ts']}, first token at {row['first_token_ts']}, "
            f"last at {row['last_token_ts']}: out of order"
        )
    if row["input_toks"] < 1 or row["output_toks"] < 1:
        raise TraceError(f"{file}, line {number}: {row['input_toks']} and {row['output_toks']} tokens")
    return {name: row[name] for name in FIELDS}


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise TraceError(f"{file}: {error.strerror}") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except OSError as error:
        raise TraceError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise TraceError(f"{file}: {error}") from None
    return content


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
