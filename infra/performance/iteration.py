"""How long one iteration of a continuously batching engine takes: a roofline with named efficiencies.

An iteration is one pass of the model over a batch: sequences that decode one token each from cached context,
and chunks of prompts. Its time is a sum over what runs one after the other: matrix products (the longer of
reading their weights and computing), attention over the KV cache and over prompt chunks, collectives, and
fixed costs. Attention is linear in the context, so that many decode-only iterations have a closed form.

Formulas: papers/orchestrrl.md 1.3, after InferSim, AIConfigurator and BLIS; touched experts of a mixture
E (1 - (1 - k/E)^tokens).
"""

from dataclasses import dataclass
from math import ceil, sqrt

from infra.hardware import Hardware
from infra.model_size import ModelSize
from infra.performance.coefficients import DEFAULT, IterationCoefficients, coefficients_of
from infra.performance.parallel import ModelDoesNotFit, Parallel

__all__ = ["BF16", "DEFAULT", "FP8", "BatchWork", "IterationCoefficients", "IterationModel", "Precision"]


@dataclass(frozen=True, slots=True)
class Precision:
    """Of the weights and of the matrix products; activations and KV stay bfloat16."""

    weight_bytes: float = 2.0  # a parameter
    compute: float = 1.0  # peak, as a multiple of bfloat16's
    tile_tokens: int = 1
    """A product of fewer tokens computes as long as for so many: the rows of its kernel's tile."""


BF16 = Precision()
FP8 = Precision(1.0, 2.0, 64)
"""DeepGEMM, whose kernels compute 64 rows at least: an H20 is bound by compute even with one token."""
ACTIVATION_BYTES = 2
KV_BYTES = 2


@dataclass(frozen=True, slots=True)
class BatchWork:
    """The work of one iteration, as sums over its batch."""

    decodes: int
    """Sequences that sample one token from cached context."""
    decode_context: int
    """Sum of their contexts, in tokens."""
    prefill_tokens: int = 0
    prefill_attended: float = 0
    """Sum over prompt chunks of tokens x (context before the chunk + half of the chunk)."""
    prefills: int = 0
    """Number of chunks."""


@dataclass(frozen=True, slots=True)
class _Product:
    """Matrix products with the same weights: the longer of reading these and of computing."""

    read_s: float
    row_s: float

    def seconds(self, rows: int) -> float:
        return max(self.read_s, rows * self.row_s)


class IterationModel:
    """Iteration times of one engine: a model, split over devices of one hardware.

    With pipeline parallelism p the batch goes through as p micro-batches, one in each stage: an iteration is
    then p stages of a micro-batch, after which every sequence has its token. With data parallelism the ranks
    have equal shares of the sequences and wait for each other. Whether the model fits, `kv_tokens` says.
    Raises ValueError where heads do not divide by the tensor parallel size.
    """

    def __init__(
        self,
        size: ModelSize,
        hardware: Hardware,
        parallel: Parallel | None = None,
        coefficients: IterationCoefficients | None = None,
        precision: Precision = BF16,
    ) -> None:
        """Without coefficients those of the hardware are taken."""
        self.size = size
        self.hardware = hardware
        self.parallel = parallel or Parallel()
        self.coefficients = coefficients or coefficients_of(hardware)
        self.precision = precision
        if size.heads % self.parallel.tensor:
            raise ValueError(
                f"{size.heads} heads do not divide by tensor_parallel_size {self.parallel.tensor}"
            )
        self._bases: dict[int, float] = {}
        share = self.coefficients
        self._bandwidth = hardware.bandwidth_tb_s * 1e12
        self._compute = hardware.tflops * 1e12
        tensor, stages = self.parallel.tensor, self.parallel.pipeline
        kv_heads = max(size.kv_heads / tensor, 1)  # of one device: beyond one a head they are replicated
        kv_bytes = KV_BYTES * 2 * size.layers * kv_heads * size.head_dim  # of a token, all stages
        attention = 4 * size.layers * size.heads * size.head_dim / tensor  # operations a pair of tokens
        self._of_context = max(
            kv_bytes / (share.kv_bandwidth * self._bandwidth),
            attention / (share.decode_attention_compute * self._compute),
        ) / (stages * self.parallel.data)
        """Seconds a token of decode context: of the whole iteration."""
        self._attention = self._product(size.attention_parameters / tensor)
        self._dense = self._product(size.dense_parameters / tensor)
        self._router = self._product(size.hidden * size.experts)
        self._of_attended = attention / (share.attention_compute * self._compute)
        self._of_attended /= stages * self.parallel.data

    def seconds(self, work: BatchWork) -> float:
        """Of one iteration; 0 for an empty batch."""
        if not work.decodes and not work.prefill_tokens:
            return 0.0
        base = self._base(work.decodes, work.prefill_tokens, work.prefills)
        return base + work.decode_context * self._of_context + work.prefill_attended * self._of_attended

    def decode_seconds(self, decodes: int, decode_context: int, iterations: int) -> float:
        """Of so many iterations that only decode, each context growing by a token an iteration.

        `decode_context` is the sum of the contexts in the first of them.
        """
        if not decodes or not iterations:
            return 0.0
        grown = iterations * (iterations - 1) // 2 * decodes
        context = iterations * decode_context + grown
        return iterations * self._base(decodes, 0, 0) + context * self._of_context

    def decode_iterations(self, decodes: int, decode_context: int, seconds: float) -> int:
        """The most whole iterations of `decode_seconds` that are done within `seconds`."""
        if not decodes or seconds <= 0:
            return 0
        growth = decodes * self._of_context / 2
        first = self._base(decodes, 0, 0) + decode_context * self._of_context - growth
        count = int(2 * seconds / (first + sqrt(first * first + 4 * growth * seconds)))
        while self.decode_seconds(decodes, decode_context, count + 1) <= seconds:
            count += 1
        while count and self.decode_seconds(decodes, decode_context, count) > seconds:
            count -= 1
        return count

    def kv_tokens(self, memory_utilization: float = 0.9) -> int:
        """KV tokens that fit the engine, all its data parallel ranks together.

        Of each device's memory `memory_utilization` is the engine's; weights and `reserved_bytes` go off.
        Raises `ModelDoesNotFit` where no token has room.
        """
        size, parallel = self.size, self.parallel
        weights = self.device_weight_bytes()
        budget = memory_utilization * self.hardware.usable_bytes
        room = budget - self.coefficients.reserved_bytes - weights
        kv_heads = max(size.kv_heads / parallel.tensor, 1)
        token = KV_BYTES * 2 * ceil(size.layers / parallel.pipeline) * kv_heads * size.head_dim
        tokens = int(room / token) * parallel.data if room > 0 else 0
        if tokens < 1:
            reserved = self.coefficients.reserved_bytes
            raise ModelDoesNotFit(
                f"the model does not fit: each of {parallel.devices} {self.hardware.name} gives the engine "
                f"{budget / 1e9:.1f} GB ({memory_utilization:g} of "
                f"{self.hardware.usable_bytes / 1e9:.1f}), of which weights take {weights / 1e9:.1f} and the "
                f"runtime {reserved / 1e9:.1f}, and nothing is left for KV: raise tensor_parallel_size or "
                f"pipeline_parallel_size, or take devices with more memory"
            )
        return tokens

    def device_weight_bytes(self) -> float:
        """Of the fullest device: a stage's layers and the embeddings or the output layer."""
        size, parallel = self.size, self.parallel
        layers = ceil(size.layers / parallel.pipeline) / size.layers
        attention = size.layers * size.attention_parameters + size.dense_layers * size.dense_parameters
        experts = size.mixture_layers * size.experts * size.expert_parameters
        tables = 1 if size.tied or parallel.pipeline > 1 else 2
        router = size.mixture_layers * size.hidden * size.experts  # on every rank
        held = attention / parallel.tensor + experts / (parallel.tensor * parallel.data) + router
        held *= layers
        return self.precision.weight_bytes * held + 2 * tables * size.embedding_parameters / parallel.tensor

    def _base(self, decodes: int, prefill_tokens: int, prefills: int) -> float:
        """Seconds of all that does not depend on contexts; of iterations that only decode they are kept."""
        if prefill_tokens:
            return self._compute_base(decodes, prefill_tokens, prefills)
        found = self._bases.get(decodes)
        if found is None:
            found = self._bases[decodes] = self._compute_base(decodes, 0, 0)
        return found

    def _compute_base(self, decodes: int, prefill_tokens: int, prefills: int) -> float:
        size, parallel, share = self.size, self.parallel, self.coefficients
        ranks = parallel.data * parallel.pipeline  # micro-batches that run beside each other
        sampled = ceil((decodes + prefills) / ranks)
        tokens = ceil((decodes + prefill_tokens) / ranks)  # of one micro-batch of one data rank
        rows = max(tokens, self.precision.tile_tokens)
        seconds = size.layers * (share.layer_s + self._attention.seconds(rows)) + self._head(sampled)
        if size.dense_layers:
            seconds += size.dense_layers * self._dense.seconds(rows)
        if size.mixture_layers:
            mixture = self._mixture(tokens) + self._router.seconds(rows) + self._exchange(tokens)
            seconds += size.mixture_layers * mixture
        hidden = tokens * size.hidden * ACTIVATION_BYTES
        if parallel.tensor > 1:
            seconds += 2 * size.layers * self.all_reduce_seconds(parallel.tensor, hidden)
        hops = parallel.pipeline - 1
        if hops:
            sent = hidden / parallel.tensor / self._link(parallel.devices)
            seconds += hops * (share.collective_s + share.hop_s + sent)
        return seconds + share.iteration_s + (decodes + prefills) * share.sequence_s

    def _product(self, parameters: float) -> "_Product":
        share, precision = self.coefficients, self.precision
        return _Product(
            precision.weight_bytes * parameters / (share.gemm_bandwidth * self._bandwidth),
            2 * parameters / (share.gemm_compute * self._compute * precision.compute),
        )

    def _head(self, sampled: int) -> float:
        share = self.coefficients
        parameters = self.size.embedding_parameters / self.parallel.tensor
        read = 2 * parameters / (share.gemm_bandwidth * self._bandwidth)
        return max(read, 2 * sampled * parameters / (share.gemm_compute * self._compute))

    def _mixture(self, tokens: int) -> float:
        """Of one mixture layer on one device: grouped products of the touched experts."""
        size, parallel, share = self.size, self.parallel, self.coefficients
        everyone = tokens * parallel.data
        touched = size.experts * (1 - (1 - size.active_experts / size.experts) ** everyone)
        on_device = parallel.expert * parallel.expert_split
        weights = self.precision.weight_bytes * touched * size.expert_parameters / on_device
        operations = 2 * everyone * size.active_experts * size.expert_parameters / on_device
        computed = (share.expert_imbalance if parallel.expert > 1 else 1) * operations
        computed /= share.expert_compute * self._compute * self.precision.compute
        read = weights / (share.expert_bandwidth * self._bandwidth)
        return max(read, computed) + share.mixture_s

    def _exchange(self, tokens: int) -> float:
        """Of one mixture layer: tokens to the ranks of their experts, and back.

        Only between data parallel ranks; between tensor parallel ones the layer's all-reduce does it. Each
        token goes at most once to each other rank: to those of its k experts, or to all, whichever is fewer;
        to all where every rank holds a slice of every expert.
        """
        data, spread = self.parallel.data, self.parallel.expert
        if data == 1:
            return 0.0
        away = self.size.active_experts * (1 - 1 / data) if spread > 1 else data - 1
        targets = min(away, data - 1)
        sent = tokens * targets * self.size.hidden * ACTIVATION_BYTES
        ranks = self.parallel.tensor * data
        share = self.coefficients
        return 2 * (share.collective_s + (data - 1) * share.hop_s + sent / self._link(ranks))

    def all_reduce_seconds(self, ranks: int, bytes_: float) -> float:
        """The quicker of NCCL's ring and, within a node, a kernel where each device reads all others'."""
        ring, direct_s = self.ring_seconds(ranks, bytes_), self.coefficients.direct_s
        if ranks == 1 or ranks > self.parallel.node or not direct_s:
            return ring
        return min(ring, direct_s + (ranks - 1) * bytes_ / self._link(ranks))

    def ring_seconds(self, ranks: int, bytes_: float) -> float:
        """Of a ring all-reduce: 2 (n - 1) steps, each of bytes / n, over the node's links or the network."""
        if ranks == 1:
            return 0.0
        share, steps = self.coefficients, 2 * (ranks - 1)
        return share.collective_s + steps * (share.hop_s + bytes_ / ranks / self._link(ranks))

    def _link(self, ranks: int) -> float:
        """Bytes a second of one direction that collectives of so many ranks get."""
        of = self.hardware.link_gb_s if ranks <= self.parallel.node else self.hardware.network_gb_s
        return of * 1e9 * self.coefficients.link_share
