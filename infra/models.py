"""The model catalogue: what matters of the published config.json of models, by plain name.

A name is that of the checkpoint in lower case, without its maker: `qwen3-8b`, `llama-3.1-70b`.
"""

import json
from pathlib import Path
from typing import Any

from infra.model_size import PUBLIC, ModelSize, UnknownModel, dense_config

MODELS: dict[str, dict[str, Any]] = {
    **{name.lower(): config for name, config in PUBLIC.items()},
    "qwen2.5-0.5b": dense_config("qwen2", (24, 896, 4864, 14, 2, 151936), True),
    "qwen2.5-1.5b": dense_config("qwen2", (28, 1536, 8960, 12, 2, 151936), True),
    "qwen2.5-3b": dense_config("qwen2", (36, 2048, 11008, 16, 2, 151936), True),
    "qwen2.5-14b": dense_config("qwen2", (48, 5120, 13824, 40, 8, 152064), False),
    "qwen2.5-32b": dense_config("qwen2", (64, 5120, 27648, 40, 8, 152064), False),
    "qwen2.5-72b": dense_config("qwen2", (80, 8192, 29568, 64, 8, 152064), False),
    "qwen2.5-math-7b": dense_config("qwen2", (28, 3584, 18944, 28, 4, 152064), False),
    "llama-3.2-1b": dense_config("llama", (16, 2048, 8192, 32, 8, 128256), True, head_dim=64),
    "llama-3.2-3b": dense_config("llama", (28, 3072, 8192, 24, 8, 128256), True, head_dim=128),
    "yi-34b": dense_config("llama", (60, 7168, 20480, 56, 8, 64000), False),
    # What flows/campaigns/laptop.yaml builds, with as many words as its tokenizer may have
    "tutti-laptop": dense_config("llama", (2, 256, 1024, 4, 4, 1024), True),
}


def model_of(name_or_directory: str | Path) -> ModelSize:
    """The size of the model whose config.json is in a directory, or else of a model of the catalogue.

    Raises `UnknownModel`, which names the catalogue.
    """
    return ModelSize.of(config_of(name_or_directory))


def config_of(name_or_directory: str | Path) -> dict[str, Any]:
    """The configuration of that model, as its config.json has it. Raises as `model_of`."""
    file = Path(name_or_directory) / "config.json"
    if file.is_file():
        config: dict[str, Any] = json.loads(file.read_text())
        return config
    plain = str(name_or_directory).lower().rsplit("/", 1)[-1].removesuffix("-instruct")
    if plain not in MODELS:
        raise UnknownModel(
            f"model {str(name_or_directory)!r} is neither a directory with a config.json nor in the "
            f"catalogue of infra/models.py: {', '.join(MODELS)}"
        )
    return MODELS[plain]
