"""Checkpoints of the Megatron trainer.

    weights/00000 …    float32 tensors by Hugging Face name, from rank 0, a bounded number of bytes a part
    optimizer/00003    the optimiser's moments that rank 3 holds
    state.json         the model's sizes, the parallelism, and which part holds which tensor

Weights are of no parallelism, so any reads them; moments are those of the ranks that wrote them.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor
from transformers import PretrainedConfig

from tasks.train.checkpoint import Checkpoints, PartEntry
from tasks.train.config import MegatronTrainerConfig
from tasks.train.process_group import broadcast_json, gather_json, rank
from tasks.train.trainers.base import CheckpointMismatch
from tasks.train.trainers.megatron.conversion import Reader
from tasks.train.trainers.megatron.weight_files import CheckpointParts

PART_BYTES = 2 << 30
"""Upper bound of a part of the weights, unless one tensor is larger."""

logger = logging.getLogger(__name__)

_SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "num_experts",
    "moe_intermediate_size",
)
_PARALLELISM = (
    "tensor_parallel",
    "pipeline_parallel",
    "expert_parallel",
    "data_parallel",
    "distributed_optimizer",
    "compute_dtype",
)


def write_checkpoint(
    checkpoints: Checkpoints,
    step: int,
    model: PretrainedConfig,
    config: MegatronTrainerConfig,
    weights: Iterator[tuple[str, Tensor]],
    optimizer: ChainedOptimizer,
) -> None:
    """Collective. It exists when rank 0 has seen every rank's part. `weights` come on rank 0."""
    if rank() == 0:
        checkpoints.begin(step)
    gather_json(None)  # nobody writes before what was there is gone
    names: dict[str, str] = {}
    mine: list[PartEntry] = []
    for number, part in enumerate(_parts(weights)):
        name = f"weights/{number:05d}"
        mine.append(checkpoints.put_part(step, name, part))
        names |= dict.fromkeys(part, name)
    tensors, group_steps = _moments(optimizer)
    mine.append(checkpoints.put_part(step, _rank_part(), tensors))
    everyone = gather_json([[asdict(entry) for entry in mine], group_steps])
    if rank() == 0:
        entries = [PartEntry(**entry) for entries, _ in everyone for entry in entries]
        state = {
            "model": _sizes(model),
            "parallelism": _parallelism(config),
            "weights": names,
            "group_steps": [steps for _, steps in everyone],
        }
        checkpoints.complete(step, entries, state)
    gather_json(None)  # a rank that returns may rely on the checkpoint


def read_checkpoint(
    checkpoints: Checkpoints,
    model: PretrainedConfig,
    config: MegatronTrainerConfig,
    optimizer: ChainedOptimizer,
    load: Callable[[Reader], None],
) -> int | None:
    """Restore the newest one; its step, or None when there is none.

    `load` fills the weights. Raises `CheckpointMismatch` before anything is changed.
    """
    # Rank 0 decides, so that all ranks read the same one.
    step: int | None = broadcast_json(max(checkpoints.steps(), default=None) if rank() == 0 else None)
    if step is None:
        return None
    state = checkpoints.load(step, []).state
    _refuse_another_model(step, state, model)
    load(CheckpointParts(checkpoints, step, state["weights"]))
    for child in optimizer.chained_optimizers:
        if child.optimizer is not None:
            child.optimizer.state.clear()
    if state["parallelism"] == _parallelism(config):
        part = _rank_part()
        _set_moments(optimizer, checkpoints.load(step, [part]).tensors[part], state["group_steps"][rank()])
    elif rank() == 0:
        logger.warning(
            "the checkpoint of step %d was written under %s: its weights are restored, and the optimiser's "
            "moments start anew under %s",
            step,
            state["parallelism"],
            _parallelism(config),
        )
    return step


def _parts(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    held: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if held and size + tensor.nbytes > PART_BYTES:
            yield held
            held, size = {}, 0
        # A weight may be a view of memory that the next one reuses, or share it with another.
        held[name] = tensor.detach().to("cpu", copy=True)
        size += tensor.nbytes
    if held:
        yield held


def _moments(optimizer: ChainedOptimizer) -> tuple[dict[str, Tensor], list[Any]]:
    """This rank's state by `optimiser/parameter/name`; steps that fused optimisers count by group."""
    tensors: dict[str, Tensor] = {}
    steps: list[Any] = []
    for number, child in enumerate(optimizer.chained_optimizers):
        for index, parameter in enumerate(child.get_parameters()):
            for name, value in child.optimizer.state.get(parameter, {}).items():
                tensors[f"{number}/{index}/{name}"] = value
        steps.append([group.get("step") for group in child.param_groups])
    return tensors, steps


@torch.no_grad()
def _set_moments(optimizer: ChainedOptimizer, tensors: dict[str, Tensor], steps: list[Any]) -> None:
    states: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        place, _, name = key.rpartition("/")
        states.setdefault(place, {})[name] = value
    for number, child in enumerate(optimizer.chained_optimizers):
        for index, parameter in enumerate(child.get_parameters()):
            for name, value in states.get(f"{number}/{index}", {}).items():
                # torch's AdamW counts its steps on the CPU.
                device = value.device if name == "step" else parameter.device
                child.optimizer.state[parameter][name] = value.to(device, copy=True)
        for group, step in zip(child.param_groups, steps[number], strict=True):
            if step is not None:
                group["step"] = step


def _refuse_another_model(step: int, state: dict[str, Any], model: PretrainedConfig) -> None:
    if "weights" not in state:
        raise CheckpointMismatch(
            f"the checkpoint of step {step} was not written by the Megatron trainer: change "
            "train.trainer.kind back, or stores.checkpoints"
        )
    differing = [name for name, value in _sizes(model).items() if state["model"].get(name) != value]
    if differing:
        raise CheckpointMismatch(
            f"the checkpoint of step {step} is of another model than the campaign's (model.path): it differs "
            f"in {', '.join(differing)}"
        )


def _sizes(model: PretrainedConfig) -> dict[str, Any]:
    return {name: getattr(model, name, None) for name in _SIZES}


def _parallelism(config: MegatronTrainerConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _PARALLELISM}


def _rank_part() -> str:
    return f"optimizer/{rank():05d}"
