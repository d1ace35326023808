"""What a campaign says of publishing weights."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from infra.config import Config


class PublicationConfig(Config):
    bucket_mib: PositiveFloat = 64
    """Weights travel in buckets of at most this size, or of one tensor."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of published floating-point weights; empty publishes them as the trainer holds them."""
    shards: PositiveInt = 1
    """Pieces in which tensors that tensor parallelism splits lie in a bucket. With the engines'
    tensor_parallel (or a multiple of it) here, each worker pulls only its own bytes."""
    delta: bool = False
    """Publish the bits that changed since the version before, compressed, losslessly. Trainer and engines
    each keep one copy of the weights in host memory for it."""
    snapshot_every: PositiveInt = 10
    """With delta, versions from one full snapshot to the next. A late engine reads the snapshot and what
    followed, and the store keeps that much."""
    threads: PositiveInt = 2
    """Threads that checksum, compress and send while the next bucket is copied."""

    @property
    def bucket_bytes(self) -> int:
        return max(int(self.bucket_mib * 2**20), 1)
