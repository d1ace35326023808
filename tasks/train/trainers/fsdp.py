"""Sharding over the ranks of a process group: PyTorch's FSDP2, a group of parameters a layer.

Each rank holds its rows of every parameter, gradient and optimiser state in float32. A layer's parameters
are gathered for its forward and again for its backward pass, in the compute dtype; gradients are reduced in
float32 and summed, since the losses' denominators are those of the whole batch already.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from tasks.train.trainers.layers import decoder_layers


def load_sharded(
    build: Callable[[bool], PreTrainedModel], mesh: DeviceMesh, compute_dtype: torch.dtype
) -> PreTrainedModel:
    """The model that rank 0 builds with its weights, sharded over `mesh`. Collective.

    `build(True)` makes it with its weights, on the CPU, in float32; `build(False)` makes the same on the meta
    device. Only rank 0 holds the whole model at a time, and lets go of it at the end.
    """
    whole = build(True) if distributed.get_rank() == 0 else None
    model = build(False)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in (*decoder_layers(model), model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    device = torch.device(mesh.device_type)
    sources: dict[str, Tensor] = {}
    if whole is not None:
        sources = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    _fill_parameters(model, sources, device)
    _fill_buffers(model, sources, device)
    return model


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. Collective where it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor that may be sharded, sharing its memory."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def own_rows(tensor: Tensor) -> range:
    """Which rows of the whole those are."""
    if not isinstance(tensor, DTensor):
        return range(tensor.shape[0] if tensor.ndim else 1)
    rows, ranks = tensor.shape[0], tensor.device_mesh.size()
    chunk = -(-rows // ranks)
    start = min(rows, chunk * tensor.device_mesh.get_local_rank())
    return range(start, min(rows, start + chunk))


@torch.no_grad()
def _fill_parameters(model: nn.Module, sources: dict[str, Tensor], device: torch.device) -> None:
    filled: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in filled:
                whole = _from_rank_0(sources, f"{prefix}.{name}", parameter, device)
                assert isinstance(parameter, DTensor)
                shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                filled[id(parameter)] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
            # A tied parameter stays one; FSDP takes the new ones up when it first runs.
            module._parameters[name] = filled[id(parameter)]


def _fill_buffers(model: nn.Module, sources: dict[str, Tensor], device: torch.device) -> None:
    for prefix, module in model.named_modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                whole = _from_rank_0(sources, f"{prefix}.{name}", buffer, device)
                distributed.broadcast(whole, 0)
                module._buffers[name] = whole


def _from_rank_0(sources: dict[str, Tensor], name: str, like: Any, device: torch.device) -> Tensor:
    """Rank 0's tensor of that name on the device, and room for one of its shape on every other rank."""
    if distributed.get_rank() == 0:
        return sources.pop(name.removeprefix(".")).detach().to(device)
    return torch.empty(like.shape, dtype=like.dtype, device=device)
