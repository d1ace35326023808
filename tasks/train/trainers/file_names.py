"""Names and shapes of a model's tensors as Hugging Face files have them.

Transformers keeps some tensors fused in memory (the experts of a mixture: one tensor for all of them) that
files, and engines that read files, know apart. For dense models the two are the same.
"""

from collections.abc import Iterator

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def as_in_files(model: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What files hold of one tensor of the model, or of its gradient: cuts only, so it holds for both."""
    yield from revert_weight_conversion(model, {name: tensor}).items()
