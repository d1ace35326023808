"""Tensors from the contents of their pieces."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tasks.weights.buckets import tensor_of
from tasks.weights.manifest import MismatchedWeights, Publication, bounds
from tasks.weights.reading import PieceKey
from tasks.weights.sharding import Plan, Slice


def pieces_of_plan(publication: Publication, plan: Plan) -> list[PieceKey]:
    """The pieces that the plan's slices touch. Raises `MismatchedWeights` on a slice that there is not."""
    return [(name, index) for name, part in plan.items() for index in _touched(publication, name, part)]


def assemble(
    publication: Publication, name: str, pieces: Mapping[PieceKey, np.ndarray], part: Slice | None = None
) -> Tensor:
    """A tensor or a slice of it. It shares memory with a piece where that alone holds what is asked."""
    entry = publication.tensors[name]
    indices = _touched(publication, name, part)
    found = [tensor_of(pieces[name, index], entry.torch_dtype, entry.piece_shape(index)) for index in indices]
    tensor = found[0] if len(found) == 1 else torch.cat(found, dim=entry.split or 0)
    if part is None:
        return tensor
    skipped = 0
    if part.dim == entry.split:
        skipped = bounds(entry.shape[part.dim], len(entry.pieces), indices[0])[0]
    if tensor.shape[part.dim] == part.stop - part.start:
        return tensor
    return tensor.narrow(part.dim, part.start - skipped, part.stop - part.start).clone()


def _touched(publication: Publication, name: str, part: Slice | None) -> list[int]:
    entry = publication.tensors.get(name)
    if entry is None:
        raise MismatchedWeights(f"version {publication.version} has no tensor {name}, which the plan names")
    everything = list(range(len(entry.pieces)))
    if part is None:
        return everything
    if part.dim >= len(entry.shape) or not 0 <= part.start < part.stop <= entry.shape[part.dim]:
        raise MismatchedWeights(
            f"version {publication.version}: {name} of {list(entry.shape)} has no slice {part}"
        )
    if part.dim != entry.split:
        return everything
    length = entry.shape[part.dim]
    ranges = [bounds(length, len(entry.pieces), index) for index in everything]
    return [
        index
        for index, (start, stop) in zip(everything, ranges, strict=True)
        if start < part.stop and stop > part.start
    ]
