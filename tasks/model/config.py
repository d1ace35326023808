"""What a campaign says of the policy: a directory in Hugging Face format, or a small one to build."""

from typing import Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from infra.config import Config


class TinyModelConfig(Config):
    """A Llama of a few million parameters with a tokenizer of its own, built and initialised here."""

    vocabulary: PositiveInt = 1024
    """Upper bound of the tokenizer's vocabulary, learned from the domains' own texts."""
    hidden_size: PositiveInt = 256
    intermediate_size: PositiveInt = 1024
    layers: PositiveInt = 2
    heads: PositiveInt = 4
    max_context: PositiveInt = 512

    @model_validator(mode="after")
    def _heads_divide(self) -> "TinyModelConfig":
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of 2 x heads ({2 * self.heads})"
            )
        return self


class WarmUpConfig(Config):
    """Supervised warm-up on the answer *format*: random valid actions in real observations, never right ones
    chosen on purpose."""

    steps: NonNegativeInt = 120
    batch_size: PositiveInt = 24
    learning_rate: PositiveFloat = 1e-3


class ModelConfig(Config):
    path: str | None = None
    """A directory in Hugging Face format. Without one, `build` is used."""
    chat_template_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the tokenizer's chat template, for example `enable_thinking: false` of Qwen3."""
    build: TinyModelConfig = Field(default_factory=TinyModelConfig)
    warm_up: WarmUpConfig = Field(default_factory=WarmUpConfig)
    """Used only for a model built here."""
