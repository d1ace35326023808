"""Does the modelled engine predict real vLLM? Fitted on one part of recorded runs, it predicts another.

`python -m tasks.simulation.validation.vllm_serving ../shared/anchors/vllm-serving` prints the table; with
`--keep` what is fitted on each whole run is kept as the calibration `<hardware>-vllm`. Needs SciPy.

Known to the model are a GPU's data sheet, the model's configuration, the engine's options, and of each
request its arrival and its lengths. Measured times enter only through the fit, and only those of the part
that the row names. What requests share of their contexts is not recorded: every prompt is computed whole.
"""

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from infra.hardware import hardware
from infra.models import model_of
from infra.performance.calibrated import FOLDER, Calibration, Fitted
from infra.performance.calibration import residual
from infra.performance.coefficients import DEFAULT, IterationCoefficients, coefficients_of
from infra.performance.iteration import IterationModel
from infra.performance.parallel import Parallel
from tasks.rollout.engines.modelled.limits import EngineLimits
from tasks.simulation.calibration.trace import TraceError
from tasks.simulation.validation.replay import replay
from tasks.simulation.validation.serving_run import Requests, Served, ServingRun

LONGEST = 32768
"""`max_model_len` of the runs, or what stands for the model's own, which no request comes near."""

FREE = ("gemm_bandwidth", "gemm_compute", "kv_bandwidth", "sequence_s")
"""Fitted: shares of bandwidth that weights and KV reach, share of compute, seconds a sequence."""
MOST = {"gemm_bandwidth": 1.0, "gemm_compute": 1.0, "kv_bandwidth": 1.0, "sequence_s": 1e-3}
OUTLIER = 0.1
"""Relative error beyond which an observation counts less (soft L1)."""
PRIOR = 0.5
"""A coefficient e times the default counts like an error of so much: what a part does not determine stays
near the default."""
FOLLOWING = ("expert_compute", "expert_bandwidth")
"""Change in proportion to `gemm_compute` and `gemm_bandwidth`: a dense model says nothing of them."""


@dataclass(frozen=True, slots=True)
class Published:
    """What LLMServingSim says of a run in its `bench/examples` (MIT): seconds, means over requests."""

    makespan: float
    latency: float
    ttft: float
    tpot: float
    wall: float  # that the simulation took


LLMSERVINGSIM = {
    "rtx4090 llama-3.1-8b": Published(183.707, 86.980, 65.820, 0.0325, 396.1),
    "rtxpro6000 llama-3.1-8b": Published(64.679, 27.695, 6.816, 0.0321, 156.5),
}
"""Its predictions, from kernels that were profiled on the very GPU."""

OTHERS = (
    ("qwen3-32b", Parallel(tensor=2), 159.7, 1250.0),
    ("qwen3-30b-a3b", Parallel(expert=2, data=2), 64.0, 3116.0),
)
"""Published makespans and output tokens/s of runs of the same requests, in another tokenizer's tokens, on RTX
PRO 6000s: predicted with what the run of Llama-3.1-8B on one such GPU says."""
OTHERS_FROM = "rtxpro6000 llama-3.1-8b"


@dataclass(frozen=True, slots=True)
class Line:
    """One prediction beside what was measured; relative deviations."""

    fitted_on: str
    predicts: str
    makespan: float  # predicted, seconds
    tokens_per_s: float
    of_makespan: float
    of_tokens_per_s: float
    of_latency: float | None = None  # of means over requests
    of_ttft: float | None = None
    of_tpot: float | None = None
    rank: float | None = None  # Spearman's, of the requests' latencies
    wall: float | None = None  # that the prediction took, seconds


class Recorded:
    """A run with what is needed to predict it."""

    def __init__(self, run: ServingRun):
        self.run = run
        self.device = hardware(run.hardware)
        self.model = run.model.rsplit("/", 1)[-1].lower().split("-instruct")[0]
        # Without what calibrations of the same runs may have added to the catalogue.
        unfitted = {name: getattr(DEFAULT, name) for name in (*FREE, *FOLLOWING)}
        self.base = coefficients_of(self.device).changed(unfitted)
        self._size = model_of(self.model)
        data = run.parallel.data
        if run.kv_tokens is None:
            self._kv_tokens = IterationModel(self._size, self.device, run.parallel).kv_tokens()
        else:
            self._kv_tokens = run.kv_tokens * data
        longest = min(LONGEST, self._kv_tokens // 16 * 16)
        self._limits = EngineLimits(run.max_running * data, run.max_batch_tokens * data, longest)

    @property
    def name(self) -> str:
        devices = self.run.parallel.devices
        return (
            f"{self.device.name} {self.model}"
            if devices == 1
            else f"{devices} {self.device.name} {self.model}"
        )

    def predict(self, values: Mapping[str, float]) -> Served:
        coefficients = scaled(self.base, values)
        timing = IterationModel(self._size, self.device, self.run.parallel, coefficients)
        return replay(self.run.served.requests, self._limits, timing, self._kv_tokens)[0]


def scaled(base: IterationCoefficients, values: Mapping[str, float]) -> IterationCoefficients:
    """With fitted values, and what follows them."""
    changed = dict(values)
    for name in FOLLOWING:
        gemm = name.replace("expert", "gemm")
        if gemm in values:
            changed[name] = min(1.0, getattr(base, name) * values[gemm] / getattr(base, gemm))
    return base.changed(changed)


def fit(recorded: Recorded, part: np.ndarray) -> dict[str, float]:
    """The coefficients with which latency and time a token of the requests in `part` (a mask) come out best.

    All requests arrive in the replay: that is the load, and known. Of the times only the part's are used.
    """
    from scipy.optimize import least_squares

    measured = recorded.run.served
    start = np.log([getattr(recorded.base, name) for name in FREE])

    def values(logs: np.ndarray) -> dict[str, float]:
        return dict(zip(FREE, np.exp(logs).tolist(), strict=True))

    def errors(logs: np.ndarray) -> np.ndarray:
        predicted = recorded.predict(values(logs))
        latency, tpot = predicted.latency / measured.latency, predicted.tpot / measured.tpot
        return np.concatenate([np.log(latency[part]), np.log(tpot[part]), PRIOR * (logs - start)])

    # A batch forms differently at some values, so a step that is too small says nothing of the slope.
    bounds = (np.full(len(FREE), -np.inf), np.log([MOST[name] for name in FREE]) + 1e-9)
    steps = {"diff_step": 0.01, "max_nfev": 40}
    found = least_squares(errors, start, loss="soft_l1", f_scale=OUTLIER, bounds=bounds, **steps)
    return values(found.x)


def line(
    fitted_on: str, recorded: Recorded, values: Mapping[str, float], part: np.ndarray | None = None
) -> Line:
    """What these coefficients predict of a run, or of a part of it: then the makespan is its last end."""
    began = time.process_time()
    predicted, measured = recorded.predict(values), recorded.run.served
    wall = time.process_time() - began
    if part is not None:
        predicted, measured = _part(predicted, part), _part(measured, part)
    return Line(
        fitted_on,
        recorded.name if part is None else f"{recorded.name}, the rest",
        predicted.makespan,
        predicted.tokens_per_s,
        predicted.makespan / measured.makespan - 1,
        predicted.tokens_per_s / measured.tokens_per_s - 1,
        predicted.latency.mean() / measured.latency.mean() - 1,
        predicted.ttft.mean() / measured.ttft.mean() - 1,
        predicted.tpot.mean() / measured.tpot.mean() - 1,
        rank_correlation(predicted.latency, measured.latency),
        wall,
    )


def other_line(
    recorded: Recorded, values: Mapping[str, float], other: tuple[str, Parallel, float, float]
) -> Line:
    """Of one of `OTHERS`: the recorded run's requests with all lengths times the ratio of the output tokens,
    and the recorded run's options for each data parallel rank."""
    model, parallel, makespan, tokens_per_s = other
    run, requests = recorded.run, recorded.run.served.requests
    ratio = makespan * tokens_per_s / requests.output.sum()
    lengths = {
        "context": np.rint(requests.context * ratio).astype(int),
        "output": np.rint(requests.output * ratio).astype(int),
    }
    served = replace(run.served, requests=replace(requests, **lengths))
    imagined = Recorded(replace(run, model=model, parallel=parallel, kv_tokens=None, served=served))
    began = time.process_time()
    predicted = imagined.predict(values)
    return Line(
        f"{recorded.name}, whole",
        imagined.name,
        predicted.makespan,
        predicted.tokens_per_s,
        predicted.makespan / makespan - 1,
        predicted.tokens_per_s / tokens_per_s - 1,
        wall=time.process_time() - began,
    )


def rank_correlation(some: np.ndarray, others: np.ndarray) -> float:
    """Spearman's."""
    from scipy.stats import spearmanr

    return float(spearmanr(some, others).statistic)


def _part(served: Served, part: np.ndarray) -> Served:
    requests = served.requests
    chosen = Requests(requests.arrival[part], requests.context[part], requests.output[part])
    return Served(chosen, served.first[part], served.last[part])


def _llmservingsim(recorded: Recorded) -> Iterable[Line]:
    published = LLMSERVINGSIM.get(recorded.name)
    if published is None:
        return
    measured = recorded.run.served
    tokens_per_s = float(measured.requests.output.sum()) / published.makespan
    yield Line(
        "LLMServingSim's own prediction",
        recorded.name,
        published.makespan,
        tokens_per_s,
        published.makespan / measured.makespan - 1,
        tokens_per_s / measured.tokens_per_s - 1,
        published.latency / measured.latency.mean() - 1,
        published.ttft / measured.ttft.mean() - 1,
        published.tpot / measured.tpot.mean() - 1,
        wall=published.wall,
    )


def load(folder: Path) -> list[Recorded]:
    """The runs in a folder, each a folder of its own. Raises `TraceError` where there is none, or one has
    holes."""
    runs = [Recorded(ServingRun.load(path.parent)) for path in sorted(folder.glob("*/meta.json"))]
    if not runs:
        raise TraceError(f"{folder} has no folder with a meta.json: no recorded run")
    return runs


def validate(runs: Sequence[Recorded]) -> tuple[list[Line], dict[str, dict[str, float]]]:
    """The table, and what was fitted on each whole run, by its name."""
    lines: list[Line] = []
    whole: dict[str, dict[str, float]] = {}
    for run in runs:
        place = np.arange(len(run.run.served.requests)) / len(run.run.served.requests)
        lines.append(line("nothing: the defaults", run, {}))
        half, tenth = fit(run, place < 0.5), fit(run, place < 0.1)
        lines.append(line("its first half", run, half))
        lines.append(line("its first half", run, half, place >= 0.5))
        lines.append(line("its first tenth", run, tenth))
        lines += _llmservingsim(run)
        whole[run.name] = fit(run, place >= 0)
    for run in runs:
        lines += [line(f"{name}, whole", run, values) for name, values in whole.items() if name != run.name]
    for run in runs:
        if run.name == OTHERS_FROM:
            lines += [other_line(run, whole[run.name], other) for other in OTHERS]
    return lines, whole


def calibrations(runs: Sequence[Recorded], whole: Mapping[str, Mapping[str, float]]) -> list[Calibration]:
    """What was fitted on whole runs, the first of each hardware, with the relative errors of requests."""
    made: dict[str, Calibration] = {}
    for run in runs:
        device, values, measured = run.device.name, whole[run.name], run.run.served
        if device in made:
            continue
        changed, predicted = scaled(run.base, values), run.predict(values)
        fitted = Fitted(
            iteration={name: float(f"{getattr(changed, name):.3g}") for name in (*FREE, *FOLLOWING)},
            residuals={
                "latency": residual(predicted.latency, measured.latency),
                "tpot": residual(predicted.tpot, measured.tpot),
            },
        )
        made[device] = Calibration(
            name=f"{device}-vllm",
            fitted_on=f"{len(measured.requests)} ShareGPT requests at about 10 a second to {run.name} on "
            "vLLM 0.19 (LLMServingSim bench/examples, MIT): latency and time a token of every request, "
            "logarithms, soft L1; experts' shares follow those of other products",
            hardware={device: fitted},
        )
    return list(made.values())


def table(lines: Iterable[Line]) -> str:
    """Markdown."""
    head = ["fitted on", "predicts", "makespan s", "tokens/s", "latency", "TTFT", "TPOT", "rank", "took s"]
    rows: list[Sequence[str]] = [head, ["---", "---", *["---:"] * 7]]
    for one in lines:
        rows.append(
            [
                one.fitted_on,
                one.predicts,
                f"{one.makespan:.1f} ({one.of_makespan:+.1%})",
                f"{one.tokens_per_s:.0f} ({one.of_tokens_per_s:+.1%})",
                *["" if of is None else f"{of:+.1%}" for of in (one.of_latency, one.of_ttft, one.of_tpot)],
                "" if one.rank is None else f"{one.rank:.4f}",
                "" if one.wall is None else f"{one.wall:.3f}",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the recorded runs")
    parser.add_argument("--keep", action="store_true", help="write the calibrations")
    options = parser.parse_args()
    runs = load(options.folder)
    lines, whole = validate(runs)
    print(table(lines))
    for name, values in whole.items():
        print(f"\n{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in values.items()))
    if options.keep:
        for kept in calibrations(runs, whole):
            kept.save(FOLDER / f"{kept.name}.json")


if __name__ == "__main__":
    main()
