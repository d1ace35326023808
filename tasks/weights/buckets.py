"""Buckets: safetensors files, packed in one pass that copies, casts and gathers each piece into its place."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tasks.weights.manifest import WeightsError, bounds, checksum
from tasks.weights.sharding import split_dimension

_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor or a slice of it, still where the trainer holds it."""

    name: str
    index: int  # of this slice
    count: int  # slices of the tensor
    split: int | None
    tensor_shape: tuple[int, ...]
    source: Tensor  # the slice, on any device and with any strides
    dtype: torch.dtype  # to publish it in

    @property
    def label(self) -> str:
        return self.name if self.count == 1 else f"{self.name}#{self.index}"

    @property
    def size(self) -> int:
        return self.source.numel() * self.dtype.itemsize


def cut(
    named_tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, shards: int
) -> Iterator[Piece]:
    """Pieces in the tensors' order; `dtype` is of floating-point ones. Raises `WeightsError` on doubles."""
    seen = set()
    for name, given in named_tensors:
        if name in seen:
            raise WeightsError(f"the tensor {name} is given twice")
        seen.add(name)
        tensor = given.detach()
        shape = tuple(tensor.shape)
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if target not in _SAFETENSORS:
            raise WeightsError(f"the tensor {name} is of {target}, which cannot be published")
        split = split_dimension(name, shape) if shards > 1 else None
        count = 1 if split is None else max(min(shards, shape[split]), 1)
        if count == 1:
            split = None
        for index in range(count):
            source = tensor
            if split is not None:
                start, stop = bounds(shape[split], count, index)
                source = tensor.narrow(split, start, stop - start)
            yield Piece(name, index, count, split, shape, source, target)


def grouped(pieces: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    """Consecutive pieces of at most `limit` bytes together, or a single one."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and size + piece.size > limit:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.size
    if group:
        yield group


def copy_to_host(piece: Piece) -> np.ndarray:
    """The content of a piece as bytes of its own: uint8 of shape (size,)."""
    host = np.empty(piece.size, np.uint8)
    tensor_of(host, piece.dtype, tuple(piece.source.shape)).copy_(piece.source)
    return host


def tensor_of(content: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """These bytes (uint8, of shape (size,)) as a tensor that shares their memory."""
    if not len(content):
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(content).view(dtype).view(shape)


def pack(pieces: Sequence[Piece]) -> tuple[np.ndarray, list[int]]:
    """A safetensors file as uint8, and the offset in it of each piece in the order given."""

    # Safetensors wants tensors aligned without gaps: the widest elements first. Then what belongs to one
    # tensor-parallel worker lies together, so that it is one range.
    def place(index: int) -> tuple[int, bool, int]:
        piece = pieces[index]
        return -piece.dtype.itemsize, piece.count > 1, piece.index

    order = sorted(range(len(pieces)), key=place)

    header: dict[str, object] = {}
    relative, end = [0] * len(pieces), 0
    for index in order:
        piece = pieces[index]
        relative[index] = end
        end += piece.size
        header[piece.label] = {
            "dtype": _SAFETENSORS[piece.dtype],
            "shape": list(piece.source.shape),
            "data_offsets": [relative[index], end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    data = np.empty(start + end, np.uint8)
    data[:8] = np.frombuffer(len(text).to_bytes(8, "little"), np.uint8)
    data[8:start] = np.frombuffer(text, np.uint8)
    for piece, offset in zip(pieces, relative, strict=True):
        target = data[start + offset : start + offset + piece.size]
        tensor_of(target, piece.dtype, tuple(piece.source.shape)).copy_(piece.source)
    return data, [start + offset for offset in relative]


def pack_payloads(payloads: Sequence[tuple[str, bytes]]) -> tuple[np.ndarray, list[int]]:
    """The same for named bytes."""
    pieces = []
    for label, payload in payloads:
        source = torch.from_numpy(np.frombuffer(payload, np.uint8).copy())
        pieces.append(Piece(label, 0, 1, None, tuple(source.shape), source, torch.uint8))
    return pack(pieces)


def piece_checksums(data: np.ndarray, pieces: Sequence[Piece], offsets: Sequence[int]) -> list[str]:
    return [
        checksum(data[offset : offset + piece.size]) for piece, offset in zip(pieces, offsets, strict=True)
    ]
