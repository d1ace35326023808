"""The float32 values that a parameter is kept in: the parameter itself, or the optimiser's copy of it."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn


class Masters:
    """Reads and sets them, wherever Megatron's optimiser keeps them."""

    def __init__(self, optimizer: ChainedOptimizer):
        self._optimizers: list[Any] = optimizer.chained_optimizers

    def get(self, parameter: nn.Parameter) -> Tensor:
        """All of it, float32, in the parameter's shape. Collective over its data-parallel ranks."""
        if parameter.dtype == torch.float32:
            return parameter.detach()
        if not self._sharded:
            master: Tensor = getattr(parameter, "main_param")  # noqa: B009
            return master.detach()
        whole = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        for shard, part in self._shards(parameter):
            whole.view(-1)[part] = shard
        dist.all_reduce(whole, group=self._group(parameter))
        return whole

    @torch.no_grad()
    def set(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the parameter and its master. Local."""
        parameter.copy_(value)
        if parameter.dtype == torch.float32:
            return
        if not self._sharded:
            getattr(parameter, "main_param").copy_(value)  # noqa: B009
        for shard, part in self._shards(parameter):
            shard.copy_(value.reshape(-1)[part])

    @property
    def _sharded(self) -> bool:
        return isinstance(self._optimizers[0], DistributedOptimizer)

    def _shards(self, parameter: nn.Parameter) -> Iterator[tuple[Tensor, slice]]:
        """This rank's shard of the master, and the elements that it holds; none where it holds none."""
        for optimizer in self._optimizers:
            if isinstance(optimizer, DistributedOptimizer) and (
                parameter in optimizer.model_param_group_index_map
            ):
                held = optimizer._get_model_param_range_map(parameter)["param"]
                group, index = optimizer.model_param_group_index_map[parameter]
                shard = optimizer.optimizer.param_groups[group]["params"][index]
                yield shard.detach(), slice(held.start, held.end)

    def _group(self, parameter: nn.Parameter) -> dist.ProcessGroup:
        if getattr(parameter, "allreduce", True):
            return parallel_state.get_data_parallel_group(with_context_parallel=True)
        return parallel_state.get_expert_data_parallel_group()
