"""What a campaign says of publishing weights."""

from typing import Literal

from pydantic import PositiveInt

from infra.config import Config


class PublicationConfig(Config):
    bucket_mib: PositiveInt = 64
    """Weights travel in buckets of at most this size, or of one tensor."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of published floating-point weights; empty publishes them as the trainer holds them."""
