"""The base of every configuration class: frozen, and an unknown key is an error."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Attribute docstrings become the descriptions that Prefect's form shows."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
