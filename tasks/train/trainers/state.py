"""What a torch trainer's checkpoint holds, whole in one process or a part from each rank.

    model, optimizer                                        one process
    model-00001-of-00004, optimizer-00001-of-00004, …       each of four ranks: its rows of every tensor

The parts' rows, in the order of the ranks, are the whole, so a checkpoint is read by any number of ranks,
each taking the rows that are its own.
"""

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tasks.train.checkpoint import Checkpoint, Checkpoints
from tasks.train.trainers.base import CheckpointMismatch
from tasks.train.trainers.fsdp import own, own_rows

_MOMENTS = ("exp_avg", "exp_avg_sq")


def part_names(rank: int, ranks: int) -> tuple[str, str]:
    """The parts, of weights and of moments, that one rank writes."""
    suffix = "" if ranks == 1 else f"-{rank:05d}-of-{ranks:05d}"
    return f"model{suffix}", f"optimizer{suffix}"


def moments_of(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """This rank's rows of AdamW's moments, by parameter; none before a parameter's first step."""
    return {
        f"{name}/{moment}": own(optimizer.state[parameter][moment])
        for name, parameter in parameters.items()
        if optimizer.state.get(parameter)
        for moment in _MOMENTS
    }


def steps_of(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Optimiser steps that each parameter has had."""
    return {
        name: float(optimizer.state[parameter]["step"])
        for name, parameter in parameters.items()
        if optimizer.state.get(parameter)
    }


def random_state(device: torch.device) -> dict[str, str]:
    """The states of this rank's random generators, as JSON values."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {kind: base64.b64encode(state.numpy().tobytes()).decode() for kind, state in states.items()}


def set_random_state(states: Mapping[str, str], device: torch.device) -> None:
    decoded = {
        kind: torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)
        for kind, state in states.items()
    }
    torch.set_rng_state(decoded["cpu"])
    if "cuda" in decoded and device.type == "cuda":
        torch.cuda.set_rng_state(decoded["cuda"], device)


@torch.no_grad()
def restore_state(
    checkpoints: Checkpoints,
    weights: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    rank: int,
    ranks: int,
) -> Checkpoint:
    """Fill `weights` and the optimiser from the newest checkpoint; returns it without its tensors.

    Nothing has changed when it raises `CheckpointMismatch`.
    """
    head = checkpoints.load(parts=())
    _require_same(head, weights)
    optimizer.state.clear()
    for name, step in head.state["optimizer_steps"].items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            # Fused AdamW keeps its step counter beside the parameter.
            "step": torch.tensor(step, dtype=torch.float32, device=parameter.device),
            **{moment: torch.zeros_like(parameter, requires_grad=False) for moment in _MOMENTS},
        }
    moments = {
        f"{name}/{moment}": optimizer.state[parameter][moment]
        for name, parameter in parameters.items()
        if optimizer.state.get(parameter)
        for moment in _MOMENTS
    }
    written_by = int(head.state["ranks"])
    # As many ranks as wrote it: each finds all of its rows in its own parts.
    sources = [rank] if written_by == ranks else range(written_by)
    for kind, targets in enumerate((dict(weights), moments)):
        filled = dict.fromkeys(targets, 0)
        for source in sources:
            part = part_names(source, written_by)[kind]
            tensors = checkpoints.load(head.step, [part]).tensors[part]
            for name, target in targets.items():
                first = own_rows(target).start if written_by == ranks else filled[name]
                _copy_rows(target, tensors[name], first)
                filled[name] += len(tensors[name]) if tensors[name].ndim else 1
    return head


def _copy_rows(target: Tensor, rows: Tensor, first: int) -> None:
    """Copy into this rank's rows of `target` those that are among `rows`, which are `first` and following."""
    if not target.ndim:
        target.copy_(rows)
        return
    mine = own_rows(target)
    start, end = max(mine.start, first), min(mine.stop, first + len(rows))
    if start < end:
        own(target)[start - mine.start : end - mine.start].copy_(rows[start - first : end - first])


def _require_same(head: Checkpoint, weights: Mapping[str, Tensor]) -> None:
    expected = {name: list(tensor.shape) for name, tensor in weights.items()}
    saved: dict[str, Any] = head.state["shapes"]
    differing = sorted(
        name for name in expected.keys() | saved.keys() if expected.get(name) != saved.get(name)
    )
    if differing:
        raise CheckpointMismatch(
            f"the checkpoint of step {head.step} is of another model than the campaign's (model.path, "
            f"model.build, train.trainer.lora): {len(differing)} tensors differ in name or shape, such as "
            f"{differing[:3]}"
        )
