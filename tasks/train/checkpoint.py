"""Checkpoints in an object store: parts first, a marker last.

    step-00000012/model.safetensors  optimizer.safetensors  state.json  _SUCCESS

Without its marker a checkpoint does not exist: a writer that is killed leaves one that is never read. The
marker is a manifest of the parts with sizes and checksums. One writer at a time (the trainer's lease sees to
that).
"""

import json
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from safetensors.torch import load, save

from infra.object_store import ObjectStore

_MARKER = "_SUCCESS"
_STATE = "state.json"
_TENSORS = ".safetensors"


class NoCheckpoint(LookupError):
    """There is no complete checkpoint, or not this one."""


class CorruptCheckpoint(ValueError):
    """A part differs from what the marker promises. The message names it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A trainer's whole state after `step` train steps."""

    step: int
    tensors: dict[str, dict[str, torch.Tensor]]  # by part, then by name
    state: dict[str, Any] = field(default_factory=dict)  # JSON values


class Checkpoints:
    """The checkpoints beneath `store`; `keep` complete ones are kept, the newest."""

    def __init__(self, store: ObjectStore, keep: int):
        if keep < 1:
            raise ValueError(f"train.checkpoint.keep must be at least 1, not {keep}")
        self._store = store
        self._keep = keep

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        keys = [key.split("/") for key in self._store.list()]
        return sorted(int(key[0].removeprefix("step-")) for key in keys if key[-1] == _MARKER)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write it whole, then remove the oldest beyond `keep` and what killed writers left behind.

        A checkpoint of the same step is replaced.
        """
        folder = _folder(checkpoint.step)
        self._remove(folder)
        parts = {
            f"{name}{_TENSORS}": save({key: tensor.contiguous() for key, tensor in tensors.items()})
            for name, tensors in checkpoint.tensors.items()
        }
        parts[_STATE] = json.dumps({"step": checkpoint.step, **checkpoint.state}).encode()
        for name, data in parts.items():
            self._store.put(f"{folder}/{name}", data, durable=True)
        manifest = {name: {"bytes": len(data), "xxh3": _checksum(data)} for name, data in parts.items()}
        self._store.put(f"{folder}/{_MARKER}", json.dumps(manifest).encode(), durable=True)
        kept = {_folder(step) for step in self.steps()[-self._keep :]} | {folder}
        for other in self._store.folders():
            if other not in kept:
                self._remove(other)

    def load(self, step: int | None = None) -> Checkpoint:
        """The checkpoint of `step`, or the newest complete one.

        Raises `NoCheckpoint`, and `CorruptCheckpoint` when a part is not what was written.
        """
        complete = self.steps()
        if not complete or (step is not None and step not in complete):
            wanted = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
            raise NoCheckpoint(f"no {wanted} in {self._store.url} (there are {complete})")
        folder = _folder(complete[-1] if step is None else step)
        manifest = json.loads(self._store.get(f"{folder}/{_MARKER}"))
        parts = {name: self._read(f"{folder}/{name}", promise) for name, promise in manifest.items()}
        state = json.loads(parts.pop(_STATE))
        tensors = {name.removesuffix(_TENSORS): load(data) for name, data in parts.items()}
        return Checkpoint(state.pop("step"), tensors, state)

    def _read(self, key: str, promise: dict[str, Any]) -> bytes:
        data = self._store.get(key)
        if len(data) != promise["bytes"] or _checksum(data) != promise["xxh3"]:
            raise CorruptCheckpoint(
                f"{key} in {self._store.url} is not what was written: remove its folder to resume from an "
                "older checkpoint"
            )
        return data

    def _remove(self, folder: str) -> None:
        # The marker goes first, so that a removal cut short leaves no checkpoint that looks complete.
        self._store.delete(f"{folder}/{_MARKER}")
        self._store.delete(folder)


def _folder(step: int) -> str:
    return f"step-{step:08d}"


def _checksum(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
