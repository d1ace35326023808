"""How a model is split over devices, and whether it fits on them."""

from dataclasses import dataclass

NODE_DEVICES = 8


class ModelDoesNotFit(ValueError):
    """The model has no room on its devices; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parallel sizes of one engine or trainer, as vLLM and Megatron-core count them.

    `data` ranks each hold the attention layers and a share of the sequences. `expert` is over how many ranks
    the experts of a mixture are spread; it divides `tensor` x `data`, and the ranks that are left split each
    expert. A group of more than `node` ranks talks over the network, a smaller one over its node's links.
    Raises ValueError for sizes below 1 and for an `expert` that does not divide.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    data: int = 1
    node: int = NODE_DEVICES
    """Devices that share a node's links."""

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert", "data", "node"):
            if getattr(self, name) < 1:
                option = "devices_per_node" if name == "node" else f"{name}_parallel_size"
                raise ValueError(f"{option} is {getattr(self, name)}: it starts at 1")
        if self.tensor * self.data % self.expert:
            raise ValueError(
                f"expert_parallel_size {self.expert} does not divide tensor x data parallel sizes "
                f"{self.tensor} x {self.data}"
            )

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def expert_split(self) -> int:
        """Ranks that share one expert's matrices."""
        return self.tensor * self.data // self.expert
