"""What a modelled engine is given: its options, and how long its iterations take."""

from dataclasses import dataclass
from typing import Protocol

from infra.performance.iteration import BatchWork


class IterationTiming(Protocol):
    """How long iterations take; see `infra.performance.iteration.IterationModel`. More work of any kind must
    never take less time."""

    def seconds(self, work: BatchWork) -> float: ...

    def decode_seconds(self, decodes: int, decode_context: int, iterations: int) -> float: ...

    def decode_iterations(self, decodes: int, decode_context: int, seconds: float) -> int: ...


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """vLLM's options: `max_num_seqs`, `max_num_batched_tokens`, `max_model_len`, `block_size`,
    `enable_prefix_caching` and `scheduler_reserve_full_isl`. Raises ValueError on what vLLM would refuse."""

    max_running: int
    max_batch_tokens: int
    max_context: int
    block_tokens: int = 16
    prefix_cache: bool = True
    reserve_context: bool = True
    """Whether a request is admitted only when blocks for its whole context are free, not for one chunk."""

    def __post_init__(self) -> None:
        if not 0 < self.max_running <= self.max_batch_tokens:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_running "
                f"({self.max_running}), and that at least 1"
            )
        if self.max_context < 2 or self.block_tokens < 1:
            raise ValueError("max_context must be at least 2 tokens, block_tokens at least 1")
