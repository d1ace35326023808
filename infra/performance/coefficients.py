"""The coefficients of the iteration model: what share of a device's peak its kernels reach, and fixed costs.

Where each is from: [K] fitted to the kernel times of `../shared/anchors/h20-h800-kernels` (InferSim,
Apache-2.0) by `python -m infra.performance.calibration`, kept with their residuals in
`infra/performance/calibrations/`; [V] the line through Vidur's two all-reduces of 8 H100s, 1 MiB in 34 us and
16 MiB in 115 us, its constant split so that 4 H100s start in the 18 us of [C]; [C] communicator benchmarks
of vLLM's pull requests 24111 and 24532 on H100: 4 and 6 devices, 0.5 to 4 MiB; [B] published by BLIS;
[A] AIConfigurator's default; [M] measured in the run named; [E] estimated.
"""

from dataclasses import dataclass, replace
from functools import cache

from infra.hardware import Hardware, plain_name
from infra.performance.calibrated import Calibration, Fitted


@dataclass(frozen=True, slots=True)
class IterationCoefficients:
    """Of one hardware. The defaults hold for H100 and H800, which are silicon of one kind."""

    gemm_compute: float = 0.70
    """Share of peak compute that large matrix products reach. [K]"""
    gemm_bandwidth: float = 0.85
    """Share of the memory's bandwidth at which matrix products of few tokens read weights. [K]"""
    expert_compute: float = 0.60
    """`gemm_compute` of the grouped products of a mixture's experts. [K]"""
    expert_bandwidth: float = 0.84
    """`gemm_bandwidth` of the same. [K]"""
    mixture_s: float = 26e-6
    """Seconds a mixture layer besides: routing, permutation, grouped launches. [K]"""
    attention_compute: float = 0.62
    """Share of peak compute of attention over prompt chunks. [K]"""
    decode_attention_compute: float = 0.35
    """Share of peak compute of attention that decodes; counts where many heads share one KV head. [K]"""
    kv_bandwidth: float = 0.95
    """Share of the memory's bandwidth at which attention reads the KV cache while it decodes. [K]"""
    layer_s: float = 32e-6
    """Seconds a layer of one pass: launches, norms, rotary embedding, KV writes. [B]"""
    iteration_s: float = 126e-6
    """Seconds an iteration: scheduling, sampling, the host's turn. [B]"""
    sequence_s: float = 4e-6
    """Seconds a sequence of the batch: its sampling and the host's work for it. [B]"""
    collective_s: float = 9e-6
    """Seconds of any collective of NCCL besides its steps. [V] with `hop_s`"""
    hop_s: float = 1.4e-6
    """Seconds of one of the 2 (n - 1) steps of a ring all-reduce over n devices. [V]"""
    link_share: float = 0.755
    """Share of the link's bandwidth, one direction, that collectives reach. [V]"""
    direct_s: float = 5.5e-6
    """Seconds of an engine's own all-reduce besides its bytes, where each device reads all others' (vLLM's
    one-shot kernel). [C] 0: it has none, as where devices talk through the host."""
    expert_imbalance: float = 1.0
    """Tokens of the busiest expert rank over the mean. 1: experts are chosen evenly. [E]"""
    reserved_bytes: float = 3.5 * 2**30 + 367 * 2**20
    """Of a device's memory neither for weights nor for KV: runtime, activations, collectives' buffers. [A]"""

    def changed(self, changes: dict[str, float]) -> "IterationCoefficients":
        """With some replaced. Raises ValueError for a name that is none of them."""
        unknown = sorted(set(changes) - set(self.__slots__))
        if unknown:
            raise ValueError(
                f"no coefficients of the iteration model: {', '.join(unknown)}; there are "
                f"{', '.join(self.__slots__)}"
            )
        return replace(self, **changes)


DEFAULT = IterationCoefficients()

FITTED = {
    "h20": "h20-kernels",
    "h800": "h800-kernels",
    "h100": "h800-kernels",
    "h200": "h800-kernels",
    "rtx4090": "rtx4090-vllm",
    "rtxpro6000": "rtxpro6000-vllm",
}
"""Which committed calibration each hardware takes its shares from: kernels [K], or whole runs of vLLM 0.19
(tasks/simulation/validation/vllm_serving.py)."""

CHANGES: dict[str, dict[str, float]] = {
    # its small products in FP8 are bound by compute and tell nothing: read as its attention reads KV [E]
    "h20": {"gemm_bandwidth": 0.779},
    # [B] ratio of published prefill MFU to that of an H100: 0.38 and 0.32 over 0.45
    "a100": {"gemm_compute": 0.59, "attention_compute": 0.52},
    "l40s": {"gemm_compute": 0.50, "attention_compute": 0.44, "direct_s": 0.0},
    # [M] the vLLM 0.19 run of ../shared/anchors: 0.9 of the memory, less weights, less 41 408 tokens of KV
    "rtx4090": {"reserved_bytes": 1.24e9, "direct_s": 0.0},
    # LLMServingSim's description of the hardware in ../shared/anchors: devices talk through the host; memory
    # reserved as on the RTX 4090 [E]
    "rtxpro6000": {"reserved_bytes": 1.24e9, "hop_s": 20e-6, "link_share": 1.0, "direct_s": 0.0},
}
"""What else differs from `DEFAULT`."""


@cache
def _of(name: str) -> IterationCoefficients:
    fitted = Calibration.named(FITTED[name]) if name in FITTED else None
    (measured,) = fitted.hardware.values() if fitted else (Fitted(),)
    return DEFAULT.changed({**measured.iteration, **CHANGES.get(name, {})})


def coefficients_of(hardware: Hardware, calibration: Calibration | None = None) -> IterationCoefficients:
    """Of the catalogue's hardware, with what a calibration says of it.

    Raises ValueError where the calibration names a coefficient that there is not.
    """
    known = _of(plain_name(hardware.name))
    return known.changed(calibration.of(hardware.name).iteration) if calibration else known
