"""Checkpoints in an object store: parts first, a marker last.

    step-00000012/model.safetensors  optimizer.safetensors  state.json  _SUCCESS

Without its marker a checkpoint does not exist: a writer that is killed leaves one that is never read. The
marker is a manifest of the parts with sizes and checksums. One trainer at a time (its lease sees to that);
its ranks may each write parts of their own, between `begin` and `complete` on rank 0.
"""

import json
from collections.abc import Collection, Iterable, Mapping
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
class PartEntry:
    """A part as the marker promises it. Its fields are JSON values, so ranks can send it to each other."""

    name: str
    bytes: int
    xxh3: str


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
        """Write it whole: what a single writer calls. A checkpoint of the same step is replaced."""
        self.begin(checkpoint.step)
        parts = [
            self.put_part(checkpoint.step, name, tensors) for name, tensors in checkpoint.tensors.items()
        ]
        self.complete(checkpoint.step, parts, checkpoint.state)

    def begin(self, step: int) -> None:
        """Remove what there is of that step, complete or left by a killed writer. Before any `put_part`."""
        self._remove(_folder(step))

    def put_part(self, step: int, name: str, tensors: Mapping[str, torch.Tensor]) -> PartEntry:
        """Write one part; any process may, each its own names. The tensors may be on any device.

        A name is an object key (`model`, `optimizer/00001-of-00004`) other than `state`.
        """
        data = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
        return self._put(step, name, f"{name}{_TENSORS}", data)

    def complete(self, step: int, parts: Iterable[PartEntry], state: Mapping[str, Any]) -> None:
        """Make the checkpoint exist, of these parts and of `state` (JSON values).

        Then removes the oldest beyond `keep` and what killed writers left behind.
        """
        data = json.dumps({"step": step, **state}).encode()
        entries = {f"{part.name}{_TENSORS}": part for part in parts}
        entries[_STATE] = self._put(step, "state", _STATE, data)
        manifest = {key: {"bytes": entry.bytes, "xxh3": entry.xxh3} for key, entry in entries.items()}
        folder = _folder(step)
        self._store.put(f"{folder}/{_MARKER}", json.dumps(manifest).encode(), durable=True)
        kept = {_folder(complete) for complete in self.steps()[-self._keep :]} | {folder}
        for other in self._store.folders():
            if other not in kept:
                self._remove(other)

    def parts(self, step: int | None = None) -> list[str]:
        """Names of the parts with tensors of a complete checkpoint, sorted. Raises `NoCheckpoint`."""
        _, manifest = self._manifest(step)
        return sorted(key.removesuffix(_TENSORS) for key in manifest if key.endswith(_TENSORS))

    def load(self, step: int | None = None, parts: Collection[str] | None = None) -> Checkpoint:
        """The checkpoint of `step`, or the newest complete one; of its tensors only the named `parts`.

        Raises `NoCheckpoint`, also when it lacks a named part, and `CorruptCheckpoint` when a part is not
        what was written.
        """
        folder, manifest = self._manifest(step)
        wanted = {key for key in manifest if key.endswith(_TENSORS)}
        if parts is not None:
            absent = sorted({f"{name}{_TENSORS}" for name in parts} - wanted)
            if absent:
                raise NoCheckpoint(f"{folder} in {self._store.url} has no {', '.join(absent)}")
            wanted = {f"{name}{_TENSORS}" for name in parts}
        state = json.loads(self._read(f"{folder}/{_STATE}", manifest[_STATE]))
        tensors = {
            key.removesuffix(_TENSORS): load(self._read(f"{folder}/{key}", promise))
            for key, promise in manifest.items()
            if key in wanted
        }
        return Checkpoint(state.pop("step"), tensors, state)

    def _manifest(self, step: int | None) -> tuple[str, dict[str, Any]]:
        complete = self.steps()
        if not complete or (step is not None and step not in complete):
            wanted = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
            raise NoCheckpoint(f"no {wanted} in {self._store.url} (there are {complete})")
        folder = _folder(complete[-1] if step is None else step)
        return folder, json.loads(self._store.get(f"{folder}/{_MARKER}"))

    def _put(self, step: int, name: str, file: str, data: bytes) -> PartEntry:
        self._store.put(f"{_folder(step)}/{file}", data, durable=True)
        return PartEntry(name, len(data), _checksum(data))

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
