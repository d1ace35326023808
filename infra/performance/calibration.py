"""Fits coefficients of the performance models to measured times.

`python -m infra.performance.calibration ../shared/anchors/h20-h800-kernels` fits the kernels' shares of H20
and H800, prints them with their residuals and writes `infra/performance/calibrations/`. Needs SciPy.
"""

import argparse
import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from infra.hardware import Hardware, hardware
from infra.model_size import ModelSize
from infra.performance.calibrated import FOLDER, Calibration, Fitted, Residual
from infra.performance.coefficients import IterationCoefficients, coefficients_of
from infra.performance.iteration import BF16, BatchWork, IterationModel, Precision
from infra.performance.parallel import Parallel

OUTLIER = 0.1
"""Relative error beyond which an observation counts less (soft L1)."""


@dataclass(frozen=True, slots=True)
class Fit:
    values: dict[str, float]
    unbound: tuple[str, ...]
    """Of the fitted, those that the measurements say nothing about: left where they started."""
    residual: Residual


def fit(
    predict: Callable[[dict[str, float]], np.ndarray],
    start: Mapping[str, float],
    measured: Sequence[float] | np.ndarray,
) -> Fit:
    """Positive values that minimise the relative errors, in logarithms, outliers counted less.

    Raises ValueError for fewer measurements than values, and for a start or measurement that is not positive.
    """
    from scipy.optimize import least_squares

    names, target = list(start), np.asarray(measured, dtype=float)
    begin = np.array([start[name] for name in names], dtype=float)
    if len(target) < len(names):
        raise ValueError(f"{len(target)} measurements do not determine {len(names)} coefficients: {names}")
    if (target <= 0).any() or (begin <= 0).any():
        raise ValueError("measured times and starting values have to be positive")

    def at(logs: np.ndarray) -> dict[str, float]:
        return dict(zip(names, np.exp(logs).tolist(), strict=True))

    def errors(logs: np.ndarray) -> np.ndarray:
        return np.log(predict(at(logs)) / target)

    tight = {"ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-12}
    found = least_squares(errors, np.log(begin), loss="soft_l1", f_scale=OUTLIER, **tight)
    still = np.abs(found.jac).max(axis=0) < 1e-6
    values = {
        name: float(old if idle else new)
        for name, old, new, idle in zip(names, begin, np.exp(found.x), still, strict=True)
    }
    unbound = tuple(name for name, idle in zip(names, still, strict=True) if idle)
    return Fit(values, unbound, residual(predict(values), target))


def residual(predicted: np.ndarray, measured: np.ndarray) -> Residual:
    errors = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
    return Residual(
        count=len(errors),
        median=float(f"{np.median(errors):.3g}"),
        p90=float(f"{np.quantile(errors, 0.9):.3g}"),
    )


def fit_iterations(
    observed: Sequence[tuple[BatchWork, float]],
    size: ModelSize,
    device: Hardware,
    parallel: Parallel | None = None,
    *,
    free: Sequence[str] = ("gemm_bandwidth", "gemm_compute", "kv_bandwidth", "layer_s", "sequence_s"),
    start: IterationCoefficients | None = None,
    precision: Precision = BF16,
) -> Fit:
    """The `free` coefficients with which the iteration model predicts observed iterations (work, seconds)."""
    base = start or coefficients_of(device)
    works = [work for work, _ in observed]

    def predict(values: dict[str, float]) -> np.ndarray:
        model = IterationModel(size, device, parallel, base.changed(values), precision)
        return np.array([model.seconds(work) for work in works])

    return fit(predict, {name: getattr(base, name) for name in free}, [seconds for _, seconds in observed])


def kernel_calibration(folder: Path, name: str) -> tuple[Calibration, dict[str, Fit]]:
    """What the kernels of H20 or H800 reach, from InferSim's `bench_data`.

    Matrix products are FP8 ones, as shares of twice the bfloat16 peak with a byte a weight; attention is
    bfloat16. A kernel takes a latency and the longer of computing and reading.
    """
    device = hardware(name)
    fits = {
        "gemm": _fit_products(folder, device),
        "grouped_gemm": _fit_experts(folder, device),
        "decode_attention": _fit_decode_attention(folder, device),
        "prefill_attention": _fit_prefill_attention(folder, device),
    }
    bound = {
        key: value
        for found in fits.values()
        for key, value in found.values.items()
        if key not in found.unbound and not key.startswith("latency")
    }
    kept = Calibration(
        name=f"{name}-kernels",
        fitted_on="InferSim bench_data (Apache-2.0): DeepGEMM FP8 products and grouped products, bfloat16 "
        "attention of FlashInfer, FlashAttention-3 and FlashMLA; roofline and latency, logarithms, soft L1",
        hardware={
            name: Fitted(
                iteration={key: float(f"{value:.3g}") for key, value in bound.items()},
                residuals={key: found.residual for key, found in fits.items()},
            )
        },
    )
    return kept, fits


TILE = 64.0
"""Rows that DeepGEMM's kernels compute at least."""


def _roofline(
    operations: np.ndarray, read: np.ndarray, peak: float, bandwidth: float, names: tuple[str, str, str]
) -> Callable[[dict[str, float]], np.ndarray]:
    def predict(values: dict[str, float]) -> np.ndarray:
        compute, share, latency = (values[name] for name in names)
        return latency + np.maximum(operations / (compute * peak), read / (share * bandwidth))

    return predict


def _fit_products(folder: Path, device: Hardware) -> Fit:
    rows = _table(folder / f"gemm-{device.name}-data.csv")
    m, k, n = rows["m"], rows["k"], rows["n"]
    names = ("gemm_compute", "gemm_bandwidth", "latency_s")
    predict = _roofline(
        2 * np.maximum(m, TILE) * k * n,
        k * n + m * k + 2 * m * n,
        2 * device.tflops * 1e12,
        device.bandwidth_tb_s * 1e12,
        names,
    )
    return fit(predict, dict(zip(names, (0.7, 0.7, 5e-6), strict=True)), rows["latency_us"] * 1e-6)


def _fit_experts(folder: Path, device: Hardware) -> Fit:
    """Rows with one token an expert are left out: half of the experts are idle there."""
    tables = [
        _table(folder / f"grouped_gemm-{phase}-{device.name}-data.csv") for phase in ("prefill", "decode")
    ]
    rows = {key: np.concatenate([table[key] for table in tables]) for key in _EXPERT_COLUMNS}
    several = rows["tokens_per_expert"] > 1
    experts, hidden, width, tokens, up, down = (rows[key][several] for key in _EXPERT_COLUMNS)
    names = ("expert_compute", "expert_bandwidth", "mixture_s")
    predict = _roofline(
        6 * experts * tokens * hidden * width,
        experts * (3 * hidden * width + tokens * 2 * (hidden + width)),
        2 * device.tflops * 1e12,
        device.bandwidth_tb_s * 1e12,
        names,
    )
    return fit(predict, dict(zip(names, (0.7, 0.7, 1e-5), strict=True)), (up + down) * 1e-6)


_EXPERT_COLUMNS = (
    "num_local_experts",
    "hidden_size",
    "intermediate_size",
    "tokens_per_expert",
    "up_proj_us",
    "down_proj_us",
)


def _fit_decode_attention(folder: Path, device: Hardware) -> Fit:
    batch, context, heads, kv_heads, width, seconds = (
        np.array(column) for column in zip(*_decode_rows(folder, device.name), strict=True)
    )
    names = ("decode_attention_compute", "kv_bandwidth", "latency_s")
    predict = _roofline(
        4 * batch * context * heads * width,
        4 * batch * context * kv_heads * width,
        device.tflops * 1e12,
        device.bandwidth_tb_s * 1e12,
        names,
    )
    return fit(predict, dict(zip(names, (0.35, 0.7, 2e-5), strict=True)), seconds)


def _decode_rows(folder: Path, name: str) -> Iterator[tuple[float, ...]]:
    """Batch, context, heads, KV heads, head width, seconds; some files have no header."""
    for path in sorted(folder.glob(f"mha-decode-{name}-*.csv")):
        heads, kv_heads, width = (int(part) for part in path.stem.split("-")[3:])
        with path.open() as lines:
            for row in csv.reader(lines):
                if row[:2] == ["bf16", "bf16"]:
                    yield int(row[2]), int(row[3]), heads, kv_heads, width, float(row[4]) * 1e-6


def _fit_prefill_attention(folder: Path, device: Hardware) -> Fit:
    lengths, widths, seconds = [], [], []
    for path in sorted(folder.glob(f"m?a-prefill-{device.name}-*.csv")):
        kind, _, _, heads, second, third = path.stem.split("-")
        # latent attention has 128 + 64 wide keys and 128 wide values: their mean counts
        width = int(heads) * (int(third) if kind == "mha" else (2 * int(second) + int(third)) / 2)
        table = _table(path)
        lengths += table["seq_len"].tolist()
        seconds += (table["latency_us"] * 1e-6).tolist()
        widths += [width] * len(table["seq_len"])
    operations = 2 * np.array(lengths) ** 2 * np.array(widths)
    peak = device.tflops * 1e12

    def predict(values: dict[str, float]) -> np.ndarray:
        return values["latency_s"] + operations / (values["attention_compute"] * peak)

    return fit(predict, {"attention_compute": 0.7, "latency_s": 1e-5}, seconds)


def _table(path: Path) -> dict[str, np.ndarray]:
    """The numeric columns of a file with a header. Raises FileNotFoundError."""
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    return {key: np.array([float(row[key]) for row in rows]) for key in rows[0] if not key.endswith("dtype")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="InferSim's bench_data")
    parser.add_argument("--into", type=Path, default=FOLDER, help="where the calibrations are written")
    arguments = parser.parse_args()
    for name in ("h20", "h800"):
        kept, fits = kernel_calibration(arguments.folder, name)
        kept.save(arguments.into / f"{kept.name}.json")
        print(name)
        for kernel, found in fits.items():
            values = ", ".join(f"{key} {value:.3g}" for key, value in found.values.items())
            rest = f"; says nothing of {', '.join(found.unbound)}" if found.unbound else ""
            error = found.residual
            print(
                f"  {kernel}: {values}; {error.count} times, error {error.median:.1%} in the median, "
                f"{error.p90:.1%} at 90 %{rest}"
            )


if __name__ == "__main__":
    main()
