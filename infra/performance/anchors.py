"""The published measurements of papers/orchestrrl.md section 3 beside what the models predict.

`python -m infra.performance.anchors [--silicon ../shared/anchors/silicon_refs.csv]` prints the table. Nothing
is fitted to these rows, except where `rests_on` says so. Rows of systems that the models do not know are
listed with their reason and without a prediction.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from infra.hardware import hardware
from infra.models import model_of
from infra.performance.anchor_table import Anchor, summary, table
from infra.performance.coefficients import coefficients_of
from infra.performance.iteration import BF16, FP8, BatchWork, IterationModel, Precision
from infra.performance.parallel import Parallel
from infra.performance.silicon import silicon_rows
from infra.performance.steady import Load, under_concurrency, under_rate
from infra.performance.training import TrainingCoefficients, TrainingModel


def anchors(silicon: Path | None = None) -> list[Anchor]:
    """All rows; those of AIConfigurator's file besides where it is given."""
    groups = (kv_capacity, all_reduce, blis, aiconfigurator, infersim, qwen_official, verl, pretraining)
    rows = [row for group in groups for row in group()]
    return rows + (silicon_rows(silicon) if silicon else [])


def _engine(
    model: str, device: str, parallel: Parallel | None = None, precision: Precision = BF16
) -> IterationModel:
    return IterationModel(model_of(model), hardware(device), parallel, precision=precision)


def kv_capacity() -> Iterator[Anchor]:
    """The KV table of 1.2, a derivation: 80 * 10**9 bytes, of which 0.9 are used and 4 * 10**9 reserved."""
    device = replace(hardware("h800"), reported_mib=0)
    share = replace(coefficients_of(device), reserved_bytes=4e9)
    table = {
        "qwen2.5-14b": {1: 196e3, 2: 541e3, 4: 1.23e6, 8: 2.62e6},
        "qwen2.5-32b": {1: 9e3, 2: 269e3, 4: 788e3, 8: 1.83e6},
        "qwen2.5-72b": {4: 386e3, 8: 1.22e6},
    }
    for model, sizes in table.items():
        for tensor, tokens in sizes.items():
            engine = IterationModel(model_of(model), device, Parallel(tensor), share)
            yield Anchor(
                "KV capacity",
                f"{model}, H800, TP{tensor}",
                "tokens",
                tokens,
                engine.kv_tokens(0.9),
                "the table's own 80 GB and 4 GB",
            )
    measured = _engine("llama-3.1-8b", "rtx4090").kv_tokens(0.9)
    yield Anchor(
        "KV capacity",
        "llama-3.1-8b, RTX 4090, vLLM 0.19",
        "tokens",
        41_408,
        measured,
        "fitted: reserved_bytes of the RTX 4090",
    )


def all_reduce() -> Iterator[Anchor]:
    engine = _engine("qwen3-8b", "h100", Parallel(tensor=8))
    for mib, micro in ((1.0, 34.0), (16.0, 115.0)):
        yield Anchor(
            "all-reduce",
            f"8 H100, {mib:g} MiB, NCCL (Vidur)",
            "us",
            micro,
            engine.ring_seconds(8, mib * 2**20) * 1e6,
            "fitted: link_share, and collective_s with hop_s, to these two",
        )
    for mib, micro in ((0.5, 13.0), (1.0, 17.0), (2.0, 26.0), (4.0, 37.0)):
        yield Anchor(
            "all-reduce",
            f"6 H100, {mib:g} MiB, vLLM's quicker kernel (pull request 24111)",
            "us",
            micro,
            engine.all_reduce_seconds(6, mib * 2**20) * 1e6,
            "direct_s fitted to its one-shot kernel; link_share fitted to Vidur's",
            note="its two-shot kernel, the quicker one from 1 MiB on, is not modelled" if mib >= 1 else "",
        )
    yield Anchor(
        "all-reduce",
        "H800, bandwidth that collectives get (SimAI)",
        "GB/s",
        165.0,
        hardware("h800").link_gb_s * coefficients_of(hardware("h800")).link_share,
        "link_share fitted on H100",
    )


def blis() -> Iterator[Anchor]:
    """vLLM 0.15.1 on H100. Of a rate that changes each request counts as much."""
    rows = (
        ("qwen2.5-7b", 1, Load(1034, 1448), (1.0,), 7.4, 10.66),
        ("llama-3.1-70b", 4, Load(547, 248), (2.5, 6.0), 18.3, 4.50),
        ("yi-34b", 2, Load(547, 248), (2.5, 6.0), 15.6, 3.89),
    )
    for model, tensor, load, rates, token_ms, latency_s in rows:
        engine = _engine(model, "h100", Parallel(tensor))
        states = [under_rate(engine, load, rate) for rate in rates]
        shares = [rate / sum(rates) for rate in rates]
        where = f"{model}, H100 TP{tensor}, {load.prompt_tokens}/{load.response_tokens}"
        where += f", {' then '.join(f'{rate:g}' for rate in rates)} requests/s"
        token = sum(share * state.token_s for share, state in zip(shares, states, strict=True))
        latency = sum(share * state.latency_s(load) for share, state in zip(shares, states, strict=True))
        yield Anchor("BLIS", f"{where}: between tokens", "ms", token_ms, token * 1e3)
        yield Anchor("BLIS", f"{where}: end to end", "s", latency_s, latency)
    load, rates = Load(547, 248), (2.5, 6.0)
    times = [
        fmean(
            under_rate(_engine("llama-3.1-8b", "h100", Parallel(tensor)), load, rate).token_s
            for rate in rates
        )
        for tensor in (1, 2)
    ]
    note = "its load is not given: that of the rows above taken"
    for tensor, token_ms, seconds in zip((1, 2), (8.9, 5.9), times, strict=True):
        yield Anchor(
            "BLIS", f"llama-3.1-8b, H100 TP{tensor}: between tokens", "ms", token_ms, seconds * 1e3, note=note
        )
    yield Anchor("BLIS", "llama-3.1-8b, TP1 over TP2", "ratio", 8.9 / 5.9, times[0] / times[1], note=note)


def aiconfigurator() -> Iterator[Anchor]:
    engine = _engine("qwen3-32b", "h100", Parallel(2))
    dense = under_concurrency(engine, Load(1024, 1024), 32)
    where = "qwen3-32b, H100 TP2, vLLM 0.12, 1024/1024, 32 at a time"
    yield Anchor("AIConfigurator", f"{where}: per token", "ms", 20.06, dense.token_s * 1e3)
    yield Anchor(
        "AIConfigurator",
        f"{where}: first token",
        "ms",
        236.8,
        dense.first_token_s * 1e3,
        note="the benchmark's start, 32 prompts at once, counts in what was measured",
    )
    engine = _engine("qwen3-235b-a22b", "h200", Parallel(2), FP8)
    mixture = under_concurrency(engine, Load(1000, 100), 16)
    where = "qwen3-235b-a22b FP8, H200 TP2, vLLM 0.12, 1000/100, 16 at a time: per token"
    yield Anchor("AIConfigurator", where, "ms", 52.16, mixture.token_s * 1e3)


def infersim() -> Iterator[Anchor]:
    """SGLang on H20, prompts of 4096 in batches of 16384, responses of 2048; tokens a second and GPU."""
    work = BatchWork(0, 0, 16_384, 4 * 4096**2 / 2, 4)
    context = 4096 + 1024
    dense = _engine("qwen3-8b", "h20", precision=FP8)
    step = dense.seconds(BatchWork(64, 64 * context))
    yield _infersim("qwen3-8b FP8, H20: prefill", 15_061, 16_384 / dense.seconds(work), 16_328)
    yield _infersim("qwen3-8b FP8, H20: decode, 64 at a time", 2682, 64 / step, 2581)
    single = _engine("qwen3-30b-a3b", "h20")
    yield _infersim("qwen3-30b-a3b, H20: prefill", 16_594, 16_384 / single.seconds(work), 17_350)
    spread = _engine("qwen3-30b-a3b", "h20", Parallel(expert=4, data=4))
    step = spread.seconds(BatchWork(400, 400 * context))
    yield _infersim("qwen3-30b-a3b, 4 H20, DP4 EP4: decode, 100 a GPU", 2749, 100 / step, 2632)
    for phase, measured in (("prefill", 7839), ("decode", 2324)):
        yield Anchor(
            "InferSim",
            f"DeepSeek-V3, H800: {phase}",
            "tokens/s",
            measured,
            None,
            note="latent attention is not modelled",
        )


def _infersim(condition: str, measured: float, predicted: float, simulated: float) -> Anchor:
    note = f"InferSim itself, from these kernels: {simulated:,} ({simulated / measured - 1:+.1%})"
    return Anchor("InferSim", condition, "tokens/s", measured, predicted, note=note)


def qwen_official() -> Iterator[Anchor]:
    """SGLang, one request, 1 token in, 2048 out, bfloat16, H20."""
    rows = (
        ("qwen3-4b", 1, 133.1),
        ("qwen3-8b", 1, 81.7),
        ("qwen3-14b", 1, 47.1),
        ("qwen3-32b", 1, 20.7),
        ("qwen3-30b-a3b", 1, 137.2),
        ("qwen3-235b-a22b", 8, 74.5),
    )
    for model, tensor, measured in rows:
        seconds = _engine(model, "h20", Parallel(tensor)).decode_seconds(1, 1, 2048)
        yield Anchor(
            "Qwen3 official",
            f"{model}, {tensor} H20, one request, 1/2048",
            "tokens/s",
            measured,
            2048 / seconds,
            note="soft: 8B and 32B at 31 to 33 % of the bandwidth, unexplained in the source",
        )


def verl() -> Iterator[Anchor]:
    """Ratios within a step, which do not need the lengths that verl does not publish.

    FSDP2 counts as data parallel; verl recomputes activations.
    """
    size, device = model_of("qwen2.5-math-7b"), hardware("h20")
    steps = {}
    for devices in (16, 12):
        model = TrainingModel(size, device, Parallel(data=devices), _WITHOUT_STEP)
        lengths = [4096] * 48 * devices
        steps[devices] = model.forward_seconds(lengths), model.step_seconds(lengths)
    note = "4 096 tokens a sequence assumed; without recomputation it would be 1 over 3"
    for trainer, scored, trained in (("FSDP2", 88.0, 286.0), ("Megatron", 119.0, 344.0)):
        yield Anchor(
            "verl",
            f"qwen2.5-math-7b, 16 H20, {trainer}: log-probabilities over update",
            "ratio",
            scored / trained,
            steps[16][0] / steps[16][1],
            "passes: 1 forward over 4",
            note,
        )
    yield Anchor(
        "verl",
        "qwen2.5-math-7b, FSDP2: update on 12 H20 over 16",
        "ratio",
        337 / 286,
        (steps[12][1] * 16 / 12) / steps[16][1],
        "the same work over fewer devices",
        "4 096 tokens a sequence assumed; the 16 also load and offload for generation",
    )


_WITHOUT_STEP = TrainingCoefficients(step_s=0.0)


def pretraining() -> Iterator[Anchor]:
    """NeMo AutoModel's summary (2025-10), bfloat16, 512 sequences of 4096 tokens, balanced experts.

    Not one of section 3's: the only full step here whose work is published. Its memory is sharded in a way
    that the model does not know (FSDP2), so memory is not checked; whether it recomputes is not said, so both
    are listed.
    """
    for recompute, how in ((False, "activations kept"), (True, "recomputed")):
        coefficients = TrainingCoefficients(
            step_s=0.0, recompute=recompute, memory_utilization=10.0, micro_batch_tokens=16_384
        )
        model = TrainingModel(
            model_of("qwen3-30b-a3b"), hardware("h100"), Parallel(expert=8, data=8), coefficients
        )
        yield Anchor(
            "NeMo AutoModel",
            f"qwen3-30b-a3b, 8 H100, EP8 FSDP8: a step of 2.1 M tokens, {how}",
            "s",
            21.773,
            model.step_seconds([4096] * 512),
            "kernel calibration, kernel shares of training estimated",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Published measurements beside what the models predict.")
    parser.add_argument("--silicon", type=Path, help="AIConfigurator's silicon_refs.csv, for more rows")
    rows = anchors(parser.parse_args().silicon)
    print(table(rows), summary(rows), sep="\n\n")


if __name__ == "__main__":
    main()
