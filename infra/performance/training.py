"""How long a training step takes, and what splits of a model over devices have room for it.

Megatron-core's way: tensor, pipeline, expert and data parallelism, full recomputation of activations, an
optimiser sharded over the data parallel ranks (ZeRO-1), sequences packed into micro-batches.
Operations: 2 N a token forward, twice that backward, and forward again where activations are recomputed
(Narayanan et al. 2021, arXiv:2104.04473, appendix, which counts the same 4 passes); causal attention over a
sequence of l tokens 2 layers x query width x l^2 forward. Pipeline bubble (p - 1) / m, 1F1B.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from infra.hardware import Hardware
from infra.model_size import ModelSize
from infra.performance.calibrated import Calibration
from infra.performance.coefficients import IterationCoefficients, coefficients_of
from infra.performance.parallel import NODE_DEVICES, ModelDoesNotFit, Parallel

GRADIENT_BYTES = 4
WEIGHT_BYTES = 2
OPTIMISER_BYTES = 12
"""Of one parameter: float32 master weight and AdamW's two moments."""


@dataclass(frozen=True, slots=True)
class TrainingCoefficients:
    """Efficiencies of a training step, on top of those of the hardware's kernels."""

    kernel_share: float = 0.75
    """Of the peak share that single products reach, what a whole layer reaches: norms, activations,
    permutations, launches between them. [E] with it an H800 trains dense models at about 0.5 of peak, what
    Megatron-core publishes for H100 (0.41 to 0.48, recomputation not counted)."""
    expert_kernel_share: float = 0.6
    """The same of a mixture's experts. [E]"""
    exposed_collectives: float = 0.5
    """Share of tensor and expert parallel collectives that compute does not hide. [E]"""
    exposed_gradients: float = 0.5
    """Share of reducing gradients and gathering weights that the backward pass does not hide. [E]"""
    step_s: float = 1.0
    """Seconds a step besides: packing the batch, metrics, gradient norm, synchronisation. [E]"""
    micro_batch_s: float = 0.01
    """Seconds a micro-batch and stage: launches. [E]"""
    recompute: bool = True
    """Activations are computed again in the backward pass."""
    micro_batch_tokens: int = 32_768
    """Most tokens of a packed micro-batch; a longer sequence is one by itself."""
    memory_utilization: float = 0.9


DEFAULT = TrainingCoefficients()


def training_coefficients_of(
    hardware: Hardware, calibration: Calibration | None = None
) -> TrainingCoefficients:
    """Of the hardware: the defaults, with what a calibration says of it.

    Raises ValueError where the calibration names a coefficient that there is not.
    """
    changes: dict[str, Any] = dict(calibration.of(hardware.name).training) if calibration else {}
    unknown = sorted(set(changes) - set(TrainingCoefficients.__slots__))
    if unknown:
        raise ValueError(
            f"no coefficients of the training model: {', '.join(unknown)}; there are "
            f"{', '.join(TrainingCoefficients.__slots__)}"
        )
    return replace(DEFAULT, **changes)


class TrainingModel:
    """Step times of one trainer. `parallel.devices` are all its devices.

    Raises `ModelDoesNotFit` where the training state alone exceeds the memory.
    """

    def __init__(
        self,
        size: ModelSize,
        hardware: Hardware,
        parallel: Parallel,
        coefficients: TrainingCoefficients | None = None,
        kernels: IterationCoefficients | None = None,
    ) -> None:
        """Without coefficients and kernels' shares those of the hardware are taken."""
        self.size = size
        self.hardware = hardware
        self.parallel = parallel
        self.coefficients = coefficients or training_coefficients_of(hardware)
        self._kernels = kernels or coefficients_of(hardware)
        self.check_memory(0)

    def step_seconds(self, lengths: Sequence[int]) -> float:
        """Of one optimiser step on sequences of these lengths, in tokens.

        Raises `ModelDoesNotFit` where the activations of the longest do not fit beside the state.
        """
        if not lengths:
            return 0.0
        self.check_memory(max(lengths))
        passes = 4 if self.coefficients.recompute else 3
        return self._pass_seconds(lengths, passes) + self._update_seconds() + self.coefficients.step_s

    def forward_seconds(self, lengths: Sequence[int]) -> float:
        """Of one forward pass over these sequences: log-probabilities under the current weights."""
        return self._pass_seconds(lengths, 1) if lengths else 0.0

    def memory_bytes(self, longest: int) -> float:
        """Of the fullest device, its longest sequence in a micro-batch of its own."""
        return training_memory(self.size, self.parallel, longest)

    def check_memory(self, longest: int) -> None:
        room = self.coefficients.memory_utilization * self.hardware.usable_bytes
        needed = self.memory_bytes(longest)
        if needed > room:
            parallel = self.parallel
            raise ModelDoesNotFit(
                f"training does not fit: each of {parallel.devices} {self.hardware.name} has "
                f"{room / 1e9:.1f} GB and needs {needed / 1e9:.1f} (tensor {parallel.tensor}, pipeline "
                f"{parallel.pipeline}, expert {parallel.expert}, data {parallel.data} parallel, sequences of "
                f"{longest} tokens): give it more devices, or raise "
                f"tensor_parallel_size or pipeline_parallel_size"
            )

    def _pass_seconds(self, lengths: Sequence[int], passes: int) -> float:
        """Of so many passes' worth of forward compute over all sequences, on the busiest data rank."""
        parallel, share = self.parallel, self.coefficients
        ranks = _spread(lengths, parallel.data)
        slowest = max(self._rank_seconds(rank, passes) for rank in ranks)
        micro_batches = max(_micro_batches(rank, share.micro_batch_tokens) for rank in ranks)
        bubble = (parallel.pipeline - 1) / micro_batches
        return slowest * (1 + bubble) + share.micro_batch_s * (micro_batches + parallel.pipeline - 1)

    def _rank_seconds(self, lengths: Sequence[int], passes: int) -> float:
        """Of one data rank's sequences, on the devices of its tensor and pipeline ranks."""
        size, parallel, share, kernels = self.size, self.parallel, self.coefficients, self._kernels
        tokens = sum(lengths)
        squares = sum(length * length for length in lengths)
        devices = parallel.tensor * parallel.pipeline
        peak = self.hardware.tflops * 1e12 * devices
        dense = size.layers * size.attention_parameters + size.dense_layers * size.dense_parameters
        dense += size.embedding_parameters + size.mixture_layers * size.hidden * size.experts
        experts = size.mixture_layers * size.active_experts * size.expert_parameters
        forward = 2 * tokens * dense / (peak * kernels.gemm_compute * share.kernel_share)
        if experts:
            forward += 2 * tokens * experts / (peak * kernels.expert_compute * share.expert_kernel_share)
        attention = 2 * size.layers * size.heads * size.head_dim * squares
        forward += attention / (peak * kernels.attention_compute * share.kernel_share)
        sent = tokens / parallel.pipeline * size.hidden * 2 * size.layers
        collectives = 0.0
        if parallel.tensor > 1:
            volume = 2 * sent * 2 * (parallel.tensor - 1) / parallel.tensor
            collectives += volume / self._link(parallel.tensor)
        if size.experts and parallel.expert > 1:
            away = size.active_experts * (1 - 1 / parallel.expert)
            volume = 2 * sent * min(away, parallel.expert - 1) / parallel.tensor
            collectives += volume / self._link(parallel.expert * parallel.tensor)
        return passes * (forward + share.exposed_collectives * collectives)

    def _update_seconds(self) -> float:
        """Reduce gradients, step the sharded optimiser, gather the weights."""
        parallel, share = self.parallel, self.coefficients
        data = parallel.data
        exchanged = (
            _device_parameters(self.size, self.parallel) * (GRADIENT_BYTES + WEIGHT_BYTES) * (data - 1) / data
        )
        moved = self.size.parameters / parallel.devices * 2 * (OPTIMISER_BYTES + GRADIENT_BYTES)
        bandwidth = self.hardware.bandwidth_tb_s * 1e12 * self._kernels.gemm_bandwidth
        return share.exposed_gradients * exchanged / self._link(parallel.devices) + moved / bandwidth

    def _link(self, ranks: int) -> float:
        of = self.hardware.link_gb_s if ranks <= self.parallel.node else self.hardware.network_gb_s
        return of * 1e9 * self._kernels.link_share


def training_parallel(
    size: ModelSize,
    hardware: Hardware,
    devices: int,
    longest: int,
    sequences: int = 128,
    coefficients: TrainingCoefficients | None = None,
    *,
    kernels: IterationCoefficients | None = None,
    tensor: int | None = None,
    pipeline: int | None = None,
    expert: int | None = None,
    node: int = NODE_DEVICES,
) -> Parallel:
    """The quickest split over `devices` that fits sequences of `longest` tokens; what is given is kept.

    Judged by the step time of `sequences` of half that length. Raises `ModelDoesNotFit` where none fits, with
    the numbers of the one that needs the least memory.
    """
    best: tuple[float, Parallel] | None = None
    least: tuple[float, ModelDoesNotFit] | None = None
    for parallel in _splits(size, devices, tensor, pipeline, expert, node):
        try:
            model = TrainingModel(size, hardware, parallel, coefficients, kernels)
            model.check_memory(longest)
        except ModelDoesNotFit as error:
            needed = training_memory(size, parallel, longest)
            if least is None or needed < least[0]:
                least = needed, error
            continue
        seconds = model.step_seconds([max(longest // 2, 1)] * sequences)
        if best is None or seconds < best[0]:
            best = seconds, parallel
    if best is not None:
        return best[1]
    if least is not None:
        raise least[1]
    raise ModelDoesNotFit(
        f"no split of {devices} devices has tensor {tensor or 'any'}, pipeline {pipeline or 'any'} and "
        f"expert {expert or 'any'} parallel sizes that divide them, {size.heads} heads and "
        f"{size.layers} layers"
    )


def training_memory(size: ModelSize, parallel: Parallel, longest: int) -> float:
    """Bytes of the fullest device: weights, gradients, its shard of the optimiser, and activations.

    Activations are recomputed: kept are each layer's inputs, split over tensor parallel ranks, for as many
    micro-batches as are in flight, which with 1F1B is those of all layers of one.
    """
    state = _device_parameters(size, parallel) * (WEIGHT_BYTES + GRADIENT_BYTES)
    state += OPTIMISER_BYTES * size.parameters / parallel.devices
    return state + (size.activation_bytes(ceil(longest / parallel.tensor)) if longest else 0)


def _device_parameters(size: ModelSize, parallel: Parallel) -> float:
    """Of the fullest device: a stage's layers and the embeddings or the output layer."""
    share = ceil(size.layers / parallel.pipeline) / size.layers
    dense = size.layers * size.attention_parameters + size.dense_layers * size.dense_parameters
    experts = size.mixture_layers * size.experts * size.expert_parameters
    tables = 1 if size.tied or parallel.pipeline > 1 else 2
    split = dense + experts / min(parallel.expert, parallel.data)
    router = size.mixture_layers * size.hidden * size.experts
    return share * (split / parallel.tensor + router) + tables * size.embedding_parameters / parallel.tensor


def _spread(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Sequences over data ranks, longest first, each to the rank with the fewest tokens."""
    rows: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for length in sorted(lengths, reverse=True):
        load, rank = heapq.heappop(loads)
        rows[rank].append(length)
        heapq.heappush(loads, (load + length, rank))
    return rows


def _micro_batches(lengths: Sequence[int], tokens: int) -> int:
    """Of packed sequences: what their tokens fill, at least one for each that is longer."""
    longer = sum(length > tokens for length in lengths)
    rest = sum(length for length in lengths if length <= tokens)
    return max(longer + ceil(rest / tokens), 1)


def _splits(
    size: ModelSize, devices: int, tensor: int | None, pipeline: int | None, expert: int | None, node: int
) -> Iterator[Parallel]:
    powers = (1, 2, 4, 8, 16, 32, 64)
    for over_tensor in [tensor] if tensor else powers[:4]:
        if size.heads % over_tensor:
            continue
        for over_pipeline in [pipeline] if pipeline else powers[:5]:
            ranks = over_tensor * over_pipeline
            if over_pipeline > size.layers or devices % ranks:
                continue
            data = devices // ranks
            for over_expert in [expert] if expert else powers if size.experts else (1,):
                fits = not size.experts or size.experts % over_expert == 0
                if fits and data % over_expert == 0:
                    yield Parallel(over_tensor, over_pipeline, over_expert, data, node)
