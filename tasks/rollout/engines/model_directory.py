"""A model directory in Hugging Face format, as an engine reads it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    path: Path
    config: Any  # the Hugging Face configuration
    stop_tokens: frozenset[int]

    @classmethod
    def open(cls, path: Path) -> "ModelDirectory":
        """Raises `OSError` where there is no configuration, ValueError where nothing names an end token."""
        config = AutoConfig.from_pretrained(path)
        stops = _token_ids(config.eos_token_id)
        if (path / "generation_config.json").exists():
            stops |= _token_ids(GenerationConfig.from_pretrained(path).eos_token_id)
        if (path / "tokenizer_config.json").exists():
            stops |= _token_ids(AutoTokenizer.from_pretrained(path).eos_token_id)
        if not stops:
            raise ValueError(
                f"{path}: neither config.json nor generation_config.json nor the tokenizer names "
                "an eos token: set eos_token_id"
            )
        return cls(path, config, frozenset(stops))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Named tensors of all its safetensors files. Raises FileNotFoundError when there are none."""
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{self.path} has no *.safetensors")
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118, not a dict
                    yield name, tensors.get_tensor(name)


def _token_ids(ids: int | list[int] | None) -> set[int]:
    if ids is None:
        return set()
    return {ids} if isinstance(ids, int) else set(ids)
