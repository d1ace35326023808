"""Small JSON values between the ranks of a trainer. Nothing that a peer sends is unpickled.

They travel as CPU tensors, over the group's gloo back end.
"""

import json
from typing import Any

import torch
from torch import distributed


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def ranks() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def broadcast_json(value: Any = None) -> Any:
    """Rank 0's value, on every rank. Collective."""
    data = _encode(value)
    length = torch.tensor([len(data)])
    distributed.broadcast(length, 0)
    if distributed.get_rank() != 0:
        data = torch.zeros(int(length), dtype=torch.uint8)
    distributed.broadcast(data, 0)
    return _decode(data)


def gather_json(value: Any) -> list[Any]:
    """Every rank's value, by rank. Collective."""
    if ranks() == 1:
        return [value]
    data = _encode(value)
    lengths = [torch.zeros(1, dtype=torch.long) for _ in range(ranks())]
    distributed.all_gather(lengths, torch.tensor([len(data)]))
    longest = max(int(length) for length in lengths)
    rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(ranks())]
    distributed.all_gather(rows, torch.cat([data, data.new_zeros(longest - len(data))]))
    return [_decode(row[: int(length)]) for row, length in zip(rows, lengths, strict=True)]


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
