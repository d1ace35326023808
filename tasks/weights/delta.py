"""Lossless deltas: the bits of a piece that changed since the version before.

The two contents are compared as unsigned integers of the element's width. `sparse` holds, for the elements
that changed, the distance to the one before and the XOR of old and new; `xor` holds the XOR of all. Both are
cut into byte planes (all lowest bytes, then all second ones …), which puts like with like, and compressed by
Zstandard. Applied twice, a delta undoes itself.
"""

from typing import Any

import numpy as np
import zstandard

from tasks.weights.manifest import CorruptWeights, Encoding

_SPARSE_LEVEL, _WHOLE_LEVEL = 3, 1
_SPARSE_UP_TO = 0.25  # beyond it positions cost more than the zeros that they save
_WHOLE_FROM = 0.05  # below it the positions alone, compressed, are less than the zeros between them
_UNSIGNED: dict[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_GAP = np.dtype("<u4")


def encode(before: np.ndarray, now: np.ndarray, itemsize: int) -> tuple[Encoding, bytes]:
    """What turns `before` into `now`, both uint8 of equal length: the smallest of the encodings.

    `raw` is `now` itself, where no encoding is smaller.
    """
    changed = _elements(before, itemsize) ^ _elements(now, itemsize)
    where = np.flatnonzero(changed)
    if not len(where):
        return "same", b""
    candidates: list[tuple[Encoding, bytes]] = [("raw", now.tobytes())]
    density = len(where) / len(changed)
    if density <= _SPARSE_UP_TO and len(changed) < 2**32:
        gaps = np.diff(where, prepend=0).astype(_GAP)
        content = _planes(gaps) + _planes(changed[where])
        candidates.append(("sparse", zstandard.ZstdCompressor(level=_SPARSE_LEVEL).compress(content)))
    if density >= _WHOLE_FROM:
        content = _planes(changed)
        candidates.append(("xor", zstandard.ZstdCompressor(level=_WHOLE_LEVEL).compress(content)))
    return min(candidates, key=lambda candidate: len(candidate[1]))


def apply(encoding: Encoding, payload: bytes, content: np.ndarray, itemsize: int) -> None:
    """Turn `content` (uint8, in place) into what `encode` was given as `now`; again, back into `before`.

    `raw` replaces the content and is not undone. Raises `CorruptWeights` on a payload that cannot be one of
    this content; whether the result is right, a checksum of the content says.
    """
    if encoding == "same":
        return
    if encoding == "raw":
        if len(payload) != len(content):
            raise CorruptWeights(f"a delta has {len(payload)} bytes for a content of {len(content)}")
        content[:] = np.frombuffer(payload, np.uint8)
        return
    elements = _elements(content, itemsize)
    width = elements.dtype.itemsize
    if encoding == "xor":
        whole = _decompress(payload, len(content))
        if len(whole) != len(content):
            raise CorruptWeights(f"a delta holds {len(whole)} bytes for a content of {len(content)}")
        elements ^= _from_planes(whole, elements.dtype)
        return
    planes = _decompress(payload, len(elements) * (_GAP.itemsize + width))
    count, rest = divmod(len(planes), _GAP.itemsize + width)
    where = np.cumsum(_from_planes(planes[: count * _GAP.itemsize], _GAP), dtype=np.int64)
    if rest or (count and where[-1] >= len(elements)) or np.any(np.diff(where) <= 0):
        raise CorruptWeights("a delta names elements that there are not")
    elements[where] ^= _from_planes(planes[count * _GAP.itemsize :], elements.dtype)


def _elements(content: np.ndarray, itemsize: int) -> np.ndarray:
    """The same memory as unsigned integers of the element's width, or of the widest that divides it."""
    width = next(width for width in (8, 4, 2, 1) if itemsize % width == 0 and len(content) % width == 0)
    elements: np.ndarray = content.view(_UNSIGNED[width])
    return elements


def _planes(values: np.ndarray) -> bytes:
    return values.view(np.uint8).reshape(-1, values.dtype.itemsize).T.tobytes()


def _from_planes(data: bytes, dtype: np.dtype) -> np.ndarray:
    planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)


def _decompress(payload: bytes, limit: int) -> bytes:
    """Raises `CorruptWeights`, also for what would be longer than `limit` bytes."""
    try:
        if zstandard.frame_content_size(payload) > limit:
            raise CorruptWeights("a delta is longer than what it applies to")
        return zstandard.ZstdDecompressor().decompress(payload, max_output_size=limit)
    except zstandard.ZstdError as error:
        raise CorruptWeights(f"a delta cannot be decompressed: {error}") from None
