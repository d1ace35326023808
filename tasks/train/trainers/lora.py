"""Low-rank adapters (LoRA, arXiv:2106.09685): y = W x + (alpha / rank) · B A x, with W frozen.

The adapters are two more parameters of the linear layer itself, so every other name stays as Hugging Face
has it, and the layers shard and compute again like any other. (The peft package renames every parameter of a
model, which publishing and sharding would have to undo.)
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from tasks.train.config import LoraConfig

DOWN, UP = "lora_A", "lora_B"  # A [rank, in], B [out, rank]


class LoraTargets(ValueError):
    """No layer of the model, or not every target, fits `train.trainer.lora.targets`."""


def add_adapters(model: nn.Module, config: LoraConfig, seed: int) -> list[str]:
    """Freeze the model and give each target an adapter that changes nothing yet (B is 0).

    A is drawn uniformly as a linear layer's weight is, from `seed`. Returns the targets' names. Raises
    `LoraTargets` when one of `config.targets` fits no linear layer.
    """
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    names = []
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear) or name.rpartition(".")[2] not in config.targets:
            continue
        names.append(name)
        bound = 1 / math.sqrt(layer.in_features)
        down = layer.weight.new_empty(config.rank, layer.in_features)
        if not down.is_meta:
            down.copy_(torch.empty(down.shape).uniform_(-bound, bound, generator=generator))
        layer.register_parameter(DOWN, nn.Parameter(down))
        layer.register_parameter(UP, nn.Parameter(layer.weight.new_zeros(layer.out_features, config.rank)))
        setattr(layer, "forward", _Adapted(layer, config.alpha / config.rank))  # noqa: B010
    absent = sorted(set(config.targets) - {name.rpartition(".")[2] for name in names})
    if absent:
        raise LoraTargets(
            f"train.trainer.lora.targets: the model has no linear layer called {', '.join(absent)} (its "
            f"linear layers are called {', '.join(_linear_layers(model))})"
        )
    return names


def merged(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """W + scale · B A, in W's dtype: what an engine serves. W itself, copied, while B is 0."""
    return torch.addmm(weight, up, down, alpha=scale)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before training, for a reference policy."""
    adapted = [layer.forward for layer in model.modules() if isinstance(layer.forward, _Adapted)]
    for forward in adapted:
        forward.active = False
    try:
        yield
    finally:
        for forward in adapted:
            forward.active = True


class _Adapted:
    def __init__(self, layer: nn.Linear, scale: float):
        self._layer = layer
        self._plain = layer.forward
        self._scale = scale
        self.active = True

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._plain(x)
        if not self.active:
            return y
        down: Tensor = getattr(self._layer, DOWN)
        up: Tensor = getattr(self._layer, UP)
        return y + self._scale * functional.linear(functional.linear(x, down), up)


def _linear_layers(model: nn.Module) -> list[str]:
    layers = {
        name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)
    }
    return sorted(layers)
