"""The Megatron-core trainer. megatron-core is imported here and nowhere else in the project."""

import importlib.util

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    raise ImportError(
        "train.trainer.kind is megatron, but megatron-core is not installed: pip install 'tutti[megatron]', "
        "or take train.trainer.kind: torch"
    )

from tasks.train.trainers.megatron.model import UnsupportedModel
from tasks.train.trainers.megatron.trainer import MegatronTrainer

__all__ = ["MegatronTrainer", "UnsupportedModel"]
