"""Ragged batches over a slot-based KV cache: which rows attend together, and the attention itself.

A row is one request's new tokens. Linear layers see the tokens of all rows flattened; attention sees groups
of rows of similar length, so that padding costs little.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

_CONTEXT_BUCKET_FLOOR = 7  # contexts of up to 2**7 tokens are not worth a group of their own


@dataclass(frozen=True, slots=True)
class Rows:
    """New tokens to compute: row r is tokens `starts[r] : starts[r] + counts[r]` of slot `slots[r]`.

    `sampled` marks the rows whose last token's logits are wanted. The cache holds all tokens before `starts`.
    """

    slots: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    sampled: NDArray[np.bool_]


class KvCache:
    """Keys and values of every slot: a tensor [slots * max_context, 2, kv_heads, head_dim] for each layer.

    A token's keys and values are contiguous, so writing it is one copy and reading a slot is one stream. The
    zero pages are committed by the system when a slot is first used, so unused slots cost no memory.
    """

    def __init__(
        self, layers: int, slots: int, kv_heads: int, max_context: int, head_dim: int, dtype: torch.dtype
    ):
        self.slots = slots
        self.max_context = max_context
        self.layers = [
            torch.zeros(slots * max_context, 2, kv_heads, head_dim, dtype=dtype) for _ in range(layers)
        ]

    def read(self, slot: int, start: int, count: int) -> Tensor:
        """A copy [layers, count, 2, kv_heads, head_dim] of what a slot holds from position `start` on."""
        first = slot * self.max_context + start
        return torch.stack([layer[first : first + count] for layer in self.layers])

    def write(self, slot: int, start: int, kv: Tensor) -> None:
        """Put `kv` [layers, count, 2, kv_heads, head_dim] into a slot from position `start` on."""
        first = slot * self.max_context + start
        for layer, part in zip(self.layers, kv, strict=True):
            layer[first : first + len(part)] = part


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that attend in one padded call. `rows` x `width` queries over `length` cached positions."""

    tokens: slice  # its tokens in the flat batch
    rows: int
    width: int
    length: int
    slot: int  # of the first row
    slots: Tensor  # [rows]
    gathered: Tensor | None  # [rows, length, 2, kv_heads, head_dim] room for the rows' keys and values
    padded: Tensor | None  # [rows * width] token of each padded query; None when nothing is padded
    unpadded: Tensor | None  # [tokens] padded query of each token
    mask: Tensor | None  # [rows, 1, width, length] additive, or None when every query sees everything


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Rows arranged for one forward pass; all tensors are of the flat, reordered tokens T."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    cache_index: Tensor  # [T] where the cache keeps each token
    groups: list[RowGroup]
    max_context: int
    sampled: Tensor  # [S] flat index of the last token of each sampled row, in the order the rows were given


def arrange(rows: Rows, contexts: NDArray[np.int32], cache: KvCache) -> RaggedBatch:
    """Order rows into groups and index their tokens. `contexts` is [slots, max_context] of token ids."""
    key = _bucket(rows.counts) * 64 + np.maximum(_bucket(rows.starts + rows.counts), _CONTEXT_BUCKET_FLOOR)
    order = np.lexsort((rows.slots, key))
    slots, starts, counts, key = rows.slots[order], rows.starts[order], rows.counts[order], key[order]
    ends = np.cumsum(counts)
    total = int(ends[-1])
    token_slots = np.repeat(slots, counts)
    positions = np.arange(total) - np.repeat(ends - counts - starts, counts)
    last = np.empty_like(ends)
    last[order] = ends - 1
    bounds = [0, *(np.flatnonzero(np.diff(key)) + 1).tolist(), len(order)]
    return RaggedBatch(
        token_ids=torch.from_numpy(contexts[token_slots, positions]),
        positions=torch.from_numpy(positions),
        cache_index=torch.from_numpy(token_slots * cache.max_context + positions),
        groups=[
            _group(slots[a:b], starts[a:b], counts[a:b], int(ends[a] - counts[a]), cache.layers[0])
            for a, b in itertools.pairwise(bounds)
        ],
        max_context=cache.max_context,
        sampled=torch.from_numpy(last[rows.sampled]),
    )


def attend(qkv: Tensor, batch: RaggedBatch, cached: Tensor, heads: int) -> Tensor:
    """Causal attention of rotated `qkv` [T, (heads + 2 kv_heads) * head_dim] over one layer's cache.

    Writes the new keys and values to the cache first. Returns [T, heads * head_dim]. Consecutive query heads
    share a KV head (grouped-query attention).
    """
    width = heads * cached.shape[-1]
    cached.view(len(cached), -1).index_copy_(0, batch.cache_index, qkv[:, width:])
    outputs = [
        _attend_group(qkv[group.tokens, :width], group, cached, batch.max_context) for group in batch.groups
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_group(query: Tensor, group: RowGroup, cached: Tensor, max_context: int) -> Tensor:
    _, _, kv_heads, head_dim = cached.shape
    rows, width, columns = group.rows, group.width, query.shape[1]
    shared = columns // (kv_heads * head_dim)
    if group.padded is not None:
        query = query.index_select(0, group.padded)
    # Query heads of one KV head are folded into the query axis, so keys and values are never repeated.
    query = query.view(rows, width, kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
    query = query.reshape(rows, kv_heads, shared * width, head_dim)
    by_slot = cached.view(-1, max_context, 2, kv_heads, head_dim)[:, : group.length]
    if group.gathered is None:
        kept = by_slot[group.slot : group.slot + 1]
    else:
        # One streaming copy: attending to scattered slots in place stalls on memory and takes longer.
        kept = torch.index_select(by_slot, 0, group.slots, out=group.gathered)
    key, value = kept.permute(2, 0, 3, 1, 4).unbind(0)  # [rows, kv_heads, length, head_dim] each
    mask = group.mask
    if mask is not None and shared > 1 and width > 1:
        mask = mask.repeat(1, 1, shared, 1)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    output = output.view(rows, kv_heads, shared, width, head_dim).permute(0, 3, 1, 2, 4)
    output = output.reshape(rows * width, columns)
    return output if group.unpadded is None else output.index_select(0, group.unpadded)


def _group(
    slots: NDArray[np.int64],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    first_token: int,
    cached: Tensor,
) -> RowGroup:
    rows, width, length = len(slots), int(counts.max()), int((starts + counts).max())
    total = int(counts.sum())
    padded = unpadded = None
    if total != rows * width:
        column = np.arange(width)
        first = np.cumsum(counts) - counts
        # Padding repeats the row's last token: its output is dropped, and it sees at least one position.
        padded = torch.from_numpy((first[:, None] + np.minimum(column, counts[:, None] - 1)).ravel())
        unpadded = torch.from_numpy(np.flatnonzero((column < counts[:, None]).ravel()))
    mask = None
    if width > 1 or bool((starts + 1 < length).any()):
        seen = starts[:, None] + np.minimum(np.arange(width), counts[:, None] - 1)
        hidden = torch.from_numpy(np.arange(length) > seen[:, :, None])
        mask = torch.zeros(hidden.shape, dtype=cached.dtype).masked_fill_(hidden, float("-inf")).unsqueeze(1)
    return RowGroup(
        tokens=slice(first_token, first_token + total),
        rows=rows,
        width=width,
        length=length,
        slot=int(slots[0]),
        slots=torch.from_numpy(slots),
        gathered=cached.new_empty(rows, length, *cached.shape[1:]) if rows > 1 else None,
        padded=padded,
        unpadded=unpadded,
        mask=mask,
    )


def _bucket(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """ceil(log2(size)): sizes of one bucket differ by less than a factor of two."""
    return np.frexp(sizes - 1)[1].astype(np.int64)
