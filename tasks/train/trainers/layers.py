"""The decoder layers of a model: what is sharded, and computed again, as one."""

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks of the model, in their order. Raises ValueError when the model names none."""
    kinds = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} does not say which of its modules are layers: "
            "set train.trainer.processes to 1 and activation_checkpointing off, or change model.path"
        )
    return layers


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep only each layer's input in the forward pass and compute the rest again in the backward pass.

    Not transformers' own switch: that one works in training mode only, which would turn dropout on.
    """
    for layer in decoder_layers(model):
        recomputed = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
        setattr(layer, "forward", recomputed)  # noqa: B010
