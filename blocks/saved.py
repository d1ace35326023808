"""Prefect blocks: named, saved connections to the stores of a run, edited in Prefect's dashboard.

A block holds the credentials, encrypted by Prefect; `open` gives the plain class, which knows no Prefect.
Runs name a block (`stores.block`) and never write its contents into their files.
"""

from typing import Any

from prefect.blocks.core import Block
from prefect.types import SecretDict
from pydantic import Field

from blocks.sample_buffer import SampleBuffer
from blocks.weight_store import WeightStore, open_weight_store
from infra.credentials import into_environment
from infra.object_store import ObjectStore


class ObjectStoreBlock(Block):
    """An object store: a local directory, S3, or any fsspec URL with conditional creation."""

    _block_type_name = "Tutti object store"
    _block_type_slug = "tutti-object-store"
    _description = "Where a run of Tutti keeps objects: a local directory, S3, or another fsspec URL."

    url: str = Field(
        description="A directory, or an fsspec URL such as s3://bucket/prefix.", examples=["s3://lab/tutti"]
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the fsspec file system that are not secret.",
        examples=[{"endpoint_url": "https://s3.example.org"}],
    )
    credentials: SecretDict | None = Field(
        default=None,
        description="Options of the fsspec file system that are secret, for example key and secret.",
    )

    def open(self) -> ObjectStore:
        return ObjectStore(self.url, self._all_options())

    def lend(self) -> None:
        """Let this process, and the children it starts from now on, open any URL of this block's protocol.

        By the environment (`infra.credentials`), so that nothing else has to carry the credentials. Raises
        ValueError when the block's URL is a local directory.
        """
        protocol, separator, _ = self.url.partition("://")
        if not separator:
            raise ValueError(f"{self.url} is a local directory: it needs no credentials")
        into_environment(protocol, self._all_options())

    def _all_options(self) -> dict[str, Any]:
        secret = self.credentials.get_secret_value() if self.credentials is not None else {}
        return {**self.options, **secret}


class SampleBufferBlock(Block):
    """The sample buffer of a run, between rollout and training."""

    _block_type_name = "Tutti sample buffer"
    _block_type_slug = "tutti-sample-buffer"
    _description = "Where rollout leaves trajectories and training finds them. Needs conditional creation."

    store: ObjectStoreBlock

    def open(self) -> SampleBuffer:
        return SampleBuffer(self.store.open())


class WeightStoreBlock(Block):
    """The weight store of a run, between training and inference."""

    _block_type_name = "Tutti weight store"
    _block_type_slug = "tutti-weight-store"
    _description = "Where training publishes policy versions and inference engines load them."

    store: ObjectStoreBlock

    def open(self) -> WeightStore:
        return open_weight_store(self.store.url, self.store._all_options())
