"""Brings what is sharded over ranks to rank 0, one Hugging Face tensor at a time."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from tasks.train.process_group import gather_json
from tasks.train.trainers.megatron.conversion import Conversion


class Exporter:
    """Knows which rank holds which shard of which parameter. Collective to make."""

    def __init__(self, conversion: Conversion, local: dict[str, nn.Parameter]):
        self._conversion = conversion
        self._local = local
        shapes = {name: list(parameter.shape) for name, parameter in local.items()}
        everyone = gather_json([parallel_state.get_tensor_model_parallel_rank(), shapes])
        # name: tensor-parallel rank: the lowest rank that holds it, and its shape
        self._holders: dict[str, dict[int, tuple[int, list[int]]]] = {}
        for rank, (part, shapes) in enumerate(everyone):
            for name, shape in shapes.items():
                self._holders.setdefault(name, {}).setdefault(part, (rank, shape))

    def __call__(
        self, values: Callable[[nn.Parameter], Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """What `values` gives for every parameter, assembled, on rank 0; nothing on the others.

        Collective: every rank iterates to the end. `values` is called on each rank that holds the parameter,
        in the same order, and returns a tensor of its shape; it may be collective over data-parallel ranks.
        """
        me = dist.get_rank()
        for name, parameter in self._conversion.parameters.items():
            if parameter.copy:
                continue
            mine: Tensor | None = None
            if name in self._local:
                mine = values(self._local[name]).detach().to(dtype).contiguous()
            shards = []
            for part, (rank, shape) in sorted(self._holders[name].items()):
                if part and parameter.layout == "whole":
                    continue
                if me == 0:
                    shards.append(mine if rank == 0 else _receive(shape, dtype, rank))
                elif me == rank and mine is not None:
                    dist.send(mine, 0)
            if me == 0:
                yield from self._conversion.whole(parameter, [shard for shard in shards if shard is not None])


def _receive(shape: list[int], dtype: torch.dtype, rank: int) -> Tensor:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensor = torch.empty(shape, dtype=dtype, device=device)
    dist.recv(tensor, rank)
    return tensor
