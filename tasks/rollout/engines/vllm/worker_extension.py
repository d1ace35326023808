"""What Tutti adds to vLLM's workers: taking a published version from the weight store, in place.

Runs in the vLLM environment, in every worker process. vLLM mixes `PublishedWeights` into its worker class and
calls the methods by name over `/collective_rpc`, with text for arguments.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from blocks.weight_store import open_weight_store
from tasks.weights.publication import WeightReceiver, WeightsError

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]


class PublishedWeights:
    """Two steps, so that a version is taken by every worker or by none.

    Each answers with `{"rejected": message}` when the version cannot be used, `{}` when all is well. Other
    errors are raised, and fail vLLM's call.
    """

    model_runner: Any  # vLLM's worker has these two
    model_config: Any

    def tutti_fetch_weights(self, request: str) -> dict[str, str]:
        """Pull and check a version (`{"url", "options", "version"}`) and hold it beside the present one.

        The store is that of the first call.
        """
        wanted = json.loads(request)
        self._tutti_fetched: dict[str, Tensor] = {}
        if not hasattr(self, "_tutti_receiver"):
            self._tutti_receiver = WeightReceiver(open_weight_store(wanted["url"], wanted["options"]))
        try:
            tensors = self._tutti_receiver.load_whole(wanted["version"])
        except WeightsError as error:
            return {"rejected": f"{type(error).__name__}: {error}"}
        tied = bool(self.model_config.hf_config.get_text_config().tie_word_embeddings)
        expected = checkpoint_shapes(Path(self.model_config.model))
        problems = faults({name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected, tied)
        if problems:
            return {"rejected": f"version {wanted['version']} is not of this model: {'; '.join(problems)}"}
        self._tutti_fetched = tensors
        return {}

    def tutti_swap_weights(self) -> dict[str, str]:
        """Copy what was fetched over the present weights, tensor by tensor."""
        tensors, self._tutti_fetched = self._tutti_fetched, {}
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        return {}

    def tutti_drop_weights(self) -> dict[str, str]:
        """Forget what was fetched."""
        self._tutti_fetched = {}
        return {}


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a model directory's safetensors files, which alone are read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, not a dict
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


def faults(found: Shapes, expected: Shapes, tied: bool) -> list[str]:
    """Why a version is not of the model, a line a tensor, at most eight; none when it fits.

    With tied embeddings the output layer is the embedding, whether or not it is stored a second time.
    """

    def counts(name: str) -> bool:
        return not (tied and name.endswith("lm_head.weight"))

    lines = [f"missing: {name}" for name in expected if counts(name) and name not in found]
    for name, shape in found.items():
        if not counts(name):
            continue
        if name not in expected:
            lines.append(f"unmatched: {name}")
        elif shape != expected[name]:
            lines.append(f"{name} is {list(shape)}, not {list(expected[name])}")
    return lines[:8] + ([f"and {len(lines) - 8} more"] if len(lines) > 8 else [])
