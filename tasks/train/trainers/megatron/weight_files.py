"""Where Hugging Face tensors are read from: a model directory, or the parts of a checkpoint."""

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from tasks.train.checkpoint import Checkpoints
from tasks.train.trainers.megatron.model import UnsupportedModel


class ModelDirectory:
    """Slices of the tensors of a directory in safetensors format; nothing more than a slice is read."""

    def __init__(self, directory: str | Path):
        self._directory = Path(directory)
        index = self._directory / "model.safetensors.index.json"
        if index.exists():
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            single = "model.safetensors"
            with safe_open(self._directory / single, "pt") as file:
                files = dict.fromkeys(file.keys(), single)
        self._files = files
        self._open = {name: safe_open(self._directory / name, "pt") for name in set(files.values())}

    def __call__(self, name: str, rows: slice, columns: slice) -> Tensor:
        file = self._files.get(name)
        if file is None:
            raise UnsupportedModel(f"{self._directory} has no tensor {name}: change model.path")
        found = self._open[file].get_slice(name)
        tensor: Tensor = found[rows] if len(found.get_shape()) == 1 else found[rows, columns]
        return tensor


class CheckpointParts:
    """The same of the parts of a checkpoint, which are read whole; two of them are held at a time."""

    def __init__(self, checkpoints: Checkpoints, step: int, parts: Mapping[str, str]):
        self._checkpoints = checkpoints
        self._step = step
        self._parts = parts  # name of the tensor: name of its part
        self._held: OrderedDict[str, dict[str, Tensor]] = OrderedDict()

    def __call__(self, name: str, rows: slice, columns: slice) -> Tensor:
        part = self._parts[name]
        if part not in self._held:
            while len(self._held) > 1:
                self._held.popitem(last=False)
            self._held[part] = self._checkpoints.load(self._step, [part]).tensors[part]
        tensor = self._held[part][name]
        return tensor[rows] if tensor.ndim == 1 else tensor[rows, columns]
