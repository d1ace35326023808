"""Keys and values of a stretch of a context, as one engine hands them to another. Pure.

A block says of which tokens, at which place, under which policy version they are, and is checked whole: one
that does not fit is refused before a number of it reaches a cache.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

LAYOUT = "tutti-kv-1"
"""[layers, tokens, 2 (keys, values), kv_heads, head_dim], little-endian; keys are rotated (RoPE), and the
two halves that RoPE rotates against each other lie side by side."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class KvRejected(ValueError):
    """This KV must not be used here. The message says what does not fit."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """What two engines must have in common to share KV."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def of(self, tokens: int) -> tuple[int, int, int, int, int]:
        return (self.layers, tokens, 2, self.kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class KvBlock:
    """KV of `tokens`, which are at positions `start` and on of their context."""

    version: int  # of the policy that computed it
    start: int
    tokens: NDArray[np.int32]
    kv: Tensor  # [layers, tokens, 2, kv_heads, head_dim]

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


def pack_block(block: KvBlock) -> dict[str, Any]:
    """The wire form: a header, and tokens and KV as bytes. `kv` must be contiguous."""
    tokens = block.tokens.astype("<i4").tobytes()
    content = block.kv.reshape(-1).view(torch.uint8).numpy().data
    header = {
        "layout": LAYOUT,
        "version": block.version,
        "start": block.start,
        "shape": list(block.kv.shape),
        "dtype": _NAMES[block.kv.dtype],
    }
    return {**header, "tokens": tokens, "kv": content, "checksum": _checksum(header, tokens, content)}


def unpack_block(packed: Mapping[str, Any], shape: KvShape) -> KvBlock:
    """Raises `KvRejected` where the block is not whole, or is of another shape, type or layout."""
    try:
        header = {name: packed[name] for name in ("layout", "version", "start", "shape", "dtype")}
        tokens, content, checksum = packed["tokens"], packed["kv"], packed["checksum"]
    except KeyError as error:
        raise KvRejected(f"the block has no {error}") from error
    if header["layout"] != LAYOUT:
        raise KvRejected(f"its layout is {header['layout']!r}, not {LAYOUT!r}")
    expected, dtype = list(shape.of(len(tokens) // 4)), _NAMES[shape.dtype]
    if header["shape"] != expected or header["dtype"] != dtype:
        raise KvRejected(f"it is {header['dtype']} {header['shape']}, not {dtype} {expected}")
    if len(content) != math.prod(expected) * shape.dtype.itemsize:
        raise KvRejected(f"it has {len(content)} bytes for {header['dtype']} {header['shape']}")
    if _checksum(header, tokens, content) != checksum:
        raise KvRejected("its content does not fit its checksum")
    kv = torch.empty(expected, dtype=shape.dtype)
    kv.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(content, np.uint8)
    return KvBlock(header["version"], header["start"], np.frombuffer(tokens, "<i4").astype(np.int32), kv)


def require_continues(block: KvBlock, version: int, start: int, context: NDArray[np.int32]) -> None:
    """Raise `KvRejected` unless the block goes on at `start` of this context under this policy version."""
    if block.version != version:
        raise KvRejected(f"it is of policy version {block.version}, not {version}")
    if block.start != start or block.stop == start:
        raise KvRejected(f"it is of tokens {block.start} to {block.stop}, not from {start} on")
    if not np.array_equal(block.tokens, context[start : block.stop]):
        raise KvRejected(f"it is of other tokens than those from {start} on")


def _checksum(header: Mapping[str, Any], tokens: bytes, content: Any) -> str:
    """xxh3-128, hexadecimal."""
    digest = xxhash.xxh3_128(repr(sorted(header.items())).encode())
    digest.update(tokens)
    digest.update(content)
    return digest.hexdigest()
