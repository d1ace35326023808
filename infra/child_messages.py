"""How a parent and its children frame what they say: msgpack behind a four-byte length.

settings [None, None, settings]      ready   [None, True, None, 0]
call     [id, op, payload]           answer  [id, True, result, s] or [id, False, text, s], s seconds spent
post     [None, op, payload]         (no answer)
"""

import struct
from typing import Any

import msgpack

_LENGTH = struct.Struct("<I")


def frame(message: list[Any]) -> bytes:
    """Raises TypeError when the message is not made of msgpack's types."""
    body = msgpack.packb(message, use_bin_type=True)
    return _LENGTH.pack(len(body)) + body


def frames(buffer: bytearray, data: bytes) -> list[list[Any]]:
    """The messages that are complete with `data`; the rest stays in `buffer`."""
    buffer += data
    messages = []
    start = 0
    while len(buffer) - start >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer, start)
        end = start + _LENGTH.size + length
        if end > len(buffer):
            break
        messages.append(
            msgpack.unpackb(memoryview(buffer)[start + _LENGTH.size : end], raw=False, strict_map_key=False)
        )
        start = end
    del buffer[:start]
    return messages
