"""What a dispatcher and its activations say to each other through Lithops' storage, and where it lies.

<prefix>/<dispatcher>/in/<activation>/<n>     Order: work for an activation that stayed
<prefix>/<dispatcher>/out/<activation>/<n>    Report: what an activation has to say, in order
<prefix>/<dispatcher>/in/<activation>/stop    the dispatcher wants no more of it

Everything is msgpack, which holds data only: neither end unpickles what the storage holds. An object that
does not parse is one that is being written, since not every storage creates objects whole.
"""

from dataclasses import dataclass, field
from typing import Any

import msgpack

STOP = "stop"
_PUT_TRIES = 10


@dataclass(frozen=True, slots=True)
class Work:
    """One reward to judge."""

    key: str  # digest of trajectory, function and input: the same for every try
    function: str
    fields: list[Any]  # of `RewardInput`, in order
    limit_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """What an activation says. `kind`: started, alive, results, failed or ended."""

    kind: str
    results: list[tuple[str, list[Any]]] = field(default_factory=list)  # key of the work, outcome as JSON
    seconds: float = 0.0  # results: with work, since the last; started: until ready; ended: of its life
    text: str = ""


def pack_order(work: list[Work]) -> bytes:
    return _pack([[item.key, item.function, item.fields, item.limit_s] for item in work])


def unpack_order(data: bytes) -> list[Work] | None:
    """None when the object is not whole."""
    items = _unpack(data)
    return None if items is None else [Work(*item) for item in items]


def pack_report(report: Report) -> bytes:
    return _pack([report.kind, report.results, report.seconds, report.text])


def unpack_report(data: bytes) -> Report | None:
    """None when the object is not whole."""
    items = _unpack(data)
    if items is None:
        return None
    kind, results, seconds, text = items
    return Report(kind, [(key, outcome) for key, outcome in results], seconds, text)


def put(storage: Any, key: str, data: bytes) -> None:
    """Store an object. Lithops' localhost storage removes folders that the other end has just emptied, also

    between making one and writing into it: then again.
    """
    for _ in range(_PUT_TRIES - 1):
        try:
            storage.put_object(storage.bucket, key, data)
        except FileNotFoundError:
            continue
        return
    storage.put_object(storage.bucket, key, data)


def inbox(root: str, activation: str) -> str:
    return f"{root}/in/{activation}/"


def outbox(root: str, activation: str = "") -> str:
    """Of one activation, or of all."""
    return f"{root}/out/{activation}/" if activation else f"{root}/out/"


def _pack(value: Any) -> bytes:
    data: bytes = msgpack.packb(value, use_bin_type=True)
    return data


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except ValueError:  # of which msgpack's own errors are kinds
        return None
