"""Which part of each tensor a tensor-parallel worker needs (Megatron-LM's split, arXiv 1909.08053)."""

from collections.abc import Mapping
from dataclasses import dataclass

from tasks.weights.manifest import MismatchedWeights, Publication

# Hugging Face names of the Llama, Qwen2, Qwen3 and Qwen3-MoE families.
_COLUMN_PARALLEL = frozenset(
    {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"}
)
_ROW_PARALLEL = frozenset({"o_proj", "down_proj"})


@dataclass(frozen=True, slots=True)
class Slice:
    """`tensor.narrow(dim, start, stop - start)`"""

    dim: int
    start: int
    stop: int


Plan = Mapping[str, Slice | None]  # None: the tensor whole


def split_dimension(name: str, shape: tuple[int, ...]) -> int | None:
    """The dimension that tensor parallelism splits; None for a tensor that each worker holds whole."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    if module in _COLUMN_PARALLEL and len(shape) >= 1:
        return 0
    if module in _ROW_PARALLEL and len(shape) == 2:
        return 1
    return None


def tensor_parallel_plan(publication: Publication, rank: int, size: int) -> dict[str, Slice | None]:
    """Worker `rank` of `size`'s equal slice of every tensor that is split.

    Raises `MismatchedWeights` where a length is no multiple of `size`; an engine that copies key-value heads
    to several workers instead makes a plan of its own.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is none of {size}")
    plan: dict[str, Slice | None] = {}
    for name, entry in publication.tensors.items():
        dim = split_dimension(name, entry.shape) if size > 1 else None
        if dim is None:
            plan[name] = None
            continue
        length = entry.shape[dim]
        if length % size:
            raise MismatchedWeights(
                f"{name} of {list(entry.shape)} cannot be split among {size} workers: change "
                "rollout.engine.tensor_parallel"
            )
        plan[name] = Slice(dim, length // size * rank, length // size * (rank + 1))
    return plan
