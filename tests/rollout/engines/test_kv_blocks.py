"""KV on the wire: whole, and of the right context, or refused."""

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from infra.rpc_sockets import pack, unpack
from tasks.rollout.engines.attention import KvCache
from tasks.rollout.engines.kv_blocks import (
    KvBlock,
    KvRejected,
    KvShape,
    pack_block,
    require_continues,
    unpack_block,
)

SHAPE = KvShape(layers=2, kv_heads=3, head_dim=4, dtype=torch.float32)
CONTEXT = np.arange(100, 120, dtype=np.int32)


def block(dtype: torch.dtype = torch.float32, start: int = 5, count: int = 6) -> KvBlock:
    kv = torch.arange(2 * count * 2 * 3 * 4, dtype=torch.float32).view(2, count, 2, 3, 4).to(dtype)
    return KvBlock(version=7, start=start, tokens=CONTEXT[start : start + count], kv=kv)


def sent(packed: dict[str, Any]) -> dict[str, Any]:
    received: dict[str, Any] = unpack(pack(packed))
    return received


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_block_arrives_as_it_was(dtype: torch.dtype) -> None:
    found = unpack_block(sent(pack_block(block(dtype))), replace(SHAPE, dtype=dtype))
    assert (found.version, found.start, found.stop) == (7, 5, 11)
    assert found.tokens.tolist() == [105, 106, 107, 108, 109, 110]
    assert found.kv.dtype is dtype
    assert torch.equal(found.kv, block(dtype).kv)
    require_continues(found, version=7, start=5, context=CONTEXT)


def test_numbers_lie_little_endian_in_the_order_of_the_layout() -> None:
    packed = sent(pack_block(block()))
    assert packed["shape"] == [2, 6, 2, 3, 4]  # layers, tokens, keys and values, KV heads, head dimension
    assert packed["tokens"] == struct.pack("<6i", 105, 106, 107, 108, 109, 110)
    assert packed["kv"] == struct.pack("<288f", *range(288))
    assert SHAPE.bytes_per_token == 2 * 2 * 3 * 4 * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "tutti-kv-0"}, "its layout is"),
        ({"shape": [2, 6, 2, 4, 3]}, r"it is float32 \[2, 6, 2, 4, 3\]"),
        ({"dtype": "bfloat16"}, "it is bfloat16"),
        ({"kv": b"\0" * 100}, "it has 100 bytes"),
        ({"version": 8}, "checksum"),
        ({"start": 4}, "checksum"),
        ({"tokens": struct.pack("<6i", *range(6))}, "checksum"),
        ({"kv": struct.pack("<288f", *range(1, 289))}, "checksum"),
        ({"checksum": "0" * 32}, "checksum"),
    ],
)
def test_a_block_that_is_not_whole_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KvRejected, match=message):
        unpack_block({**sent(pack_block(block())), **changes}, SHAPE)


@pytest.mark.parametrize(
    "field", ["layout", "version", "start", "shape", "dtype", "tokens", "kv", "checksum"]
)
def test_a_block_without_a_field_is_refused(field: str) -> None:
    packed = sent(pack_block(block()))
    del packed[field]
    with pytest.raises(KvRejected, match=field):
        unpack_block(packed, SHAPE)


def test_a_block_of_another_model_is_refused() -> None:
    for other in (replace(SHAPE, layers=3), replace(SHAPE, kv_heads=1), replace(SHAPE, dtype=torch.float16)):
        with pytest.raises(KvRejected, match="not"):
            unpack_block(sent(pack_block(block())), other)


def test_a_block_that_does_not_continue_what_is_there_is_refused() -> None:
    with pytest.raises(KvRejected, match="policy version 7, not 8"):
        require_continues(block(), 8, 5, CONTEXT)
    with pytest.raises(KvRejected, match="not from 4 on"):
        require_continues(block(), 7, 4, CONTEXT)
    with pytest.raises(KvRejected, match="other tokens"):
        require_continues(block(), 7, 5, CONTEXT + 1)
    with pytest.raises(KvRejected, match="other tokens"):
        require_continues(block(start=16, count=4), 7, 16, CONTEXT[:18])
    with pytest.raises(KvRejected, match="not from 5 on"):
        require_continues(block(count=0), 7, 5, CONTEXT)


def test_a_cache_gives_back_what_was_written_to_a_slot_and_leaves_the_others() -> None:
    cache = KvCache(layers=2, slots=3, kv_heads=3, max_context=16, head_dim=4, dtype=torch.float32)
    cache.write(1, 5, block().kv)
    assert torch.equal(cache.read(1, 5, 6), block().kv)
    assert torch.equal(cache.read(1, 7, 2), block().kv[:, 2:4])
    assert cache.read(1, 0, 5).count_nonzero() == cache.read(1, 11, 5).count_nonzero() == 0
    assert cache.read(0, 0, 16).count_nonzero() == cache.read(2, 0, 16).count_nonzero() == 0
