"""What megatron-core 0.16.1 asks of CUDA without need, answered by the CPU.

Megatron computes with torch and talks over torch.distributed, both of which run on a CPU; but it allocates on
"cuda" by name, waits for streams, and checks for CUDA tensor types. `megatron_device` answers these while it
is entered, and changes nothing where CUDA is.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def megatron_device() -> AbstractContextManager[None]:
    """Enter it around every call into Megatron; on a machine with CUDA it does nothing. Not reentrant."""
    return nullcontext() if torch.cuda.is_available() else _on_cpu()


class _CpuTensors(TorchFunctionMode):
    """Tensors asked for on "cuda" are made on the CPU, and CPU tensors call themselves CUDA tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not keywords:
            return func(*args).replace("torch.", "torch.cuda.")
        if "device" in keywords and torch.device(keywords["device"] or "cpu").type == "cuda":
            keywords["device"] = _CPU
        return func(*args, **keywords)


class _NoRandomStates(megatron_random.CudaRNGStatesTracker):
    """Policies have no dropout, so nothing random happens inside the model."""

    def add(self, name: str, seed: int) -> None:
        pass

    def fork(self, name: str = "") -> AbstractContextManager[None]:
        return nullcontext()


class _Inert:
    """A stream or an event, whose work is done when the call returns; so is what its methods return."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


def _moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron makes the sizes of an exchange arrays on their way from CUDA; here they are not on CUDA."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


_even_all_gather, _even_reduce_scatter = dist.all_gather, dist.reduce_scatter


def _all_gather(tensors: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """gloo gathers equal shapes only; experts' tokens on tensor-parallel ranks are not equally many."""
    if len({each.shape for each in tensors}) == 1:
        return _even_all_gather(tensors, tensor, group, async_op)
    tensors[dist.get_rank(group)].copy_(tensor)
    for rank, target in enumerate(tensors):
        if target.numel():
            dist.broadcast(target, group=group, group_src=rank)
    return None


def _reduce_scatter(
    output: Tensor,
    tensors: list[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    if len({each.shape for each in tensors}) == 1:
        return _even_reduce_scatter(output, tensors, op, group, async_op)
    for rank, tensor in enumerate(tensors):
        if tensor.numel():
            summed = tensor.clone()
            dist.reduce(summed, op=op, group=group, group_dst=rank)
            if rank == dist.get_rank(group):
                output.copy_(summed)
    return None


@contextmanager
def _on_cpu() -> Iterator[None]:
    inert = _Inert()
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "current_device", lambda: _CPU),
            (torch.cuda, "synchronize", lambda *_: None),
            (torch.cuda, "Stream", _Inert),
            (torch.cuda, "Event", _Inert),
            (torch.cuda, "stream", lambda _: nullcontext()),
            (torch.cuda, "current_stream", lambda *_: inert),
            (torch.cuda, "default_stream", lambda *_: inert),
            (megatron_random, "_CUDA_RNG_STATE_TRACKER", _NoRandomStates()),
            (megatron_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
            (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
            (megatron_random, "_set_cuda_rng_state", lambda *_, **__: None),
            (token_dispatcher, "maybe_move_tensor_to_cpu", _moved),
            (dist, "all_gather", _all_gather),
            (dist, "reduce_scatter", _reduce_scatter),
            # gloo has no coalesced reduce-scatter; the collectives run one by one.
            (param_and_grad_buffer, "_coalescing_manager", lambda *_, **__: nullcontext()),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(_CpuTensors())
        yield
