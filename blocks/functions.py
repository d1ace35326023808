"""A Prefect block that names a function service, for rewards that run on one (`reward.serverless.block`)."""

from typing import Any

from prefect.blocks.core import Block
from prefect.types import SecretDict
from pydantic import Field


class FunctionsBlock(Block):
    """A function service and its storage, as sections of Lithops' configuration."""

    _block_type_name = "Tutti functions"
    _block_type_slug = "tutti-functions"
    _description = "A function service for rewards (Alibaba Function Compute, AWS Lambda, Knative, …)."

    sections: dict[str, Any] = Field(
        default_factory=dict,
        description="Sections of Lithops' configuration that are not secret.",
        examples=[{"aws": {"region": "eu-west-1"}, "aws_lambda": {"runtime": "tutti-rewards"}}],
    )
    credentials: SecretDict | None = Field(
        default=None,
        description="Sections of Lithops' configuration that are secret.",
        examples=[{"aws": {"access_key_id": "…", "secret_access_key": "…"}}],
    )

    def open(self) -> dict[str, Any]:
        """The sections, with the secret ones over the others, a section deep."""
        secret = self.credentials.get_secret_value() if self.credentials is not None else {}
        merged = dict(self.sections)
        for name, section in secret.items():
            below = merged.get(name)
            both = isinstance(below, dict) and isinstance(section, dict)
            merged[name] = {**below, **section} if both else section  # type: ignore[dict-item]
        return merged
