"""What a campaign says of generation: sampling and inference engines."""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from infra.config import Config


class TorchEngineConfig(Config):
    """The embedded engine: continuous batching with a KV cache, for CPUs and small models."""

    kind: Literal["torch"] = "torch"
    workers: PositiveInt = 1
    """Engine processes; the proxy balances between them."""
    threads: PositiveInt = 1
    """Torch threads of each worker."""
    max_running: PositiveInt = 64
    """Requests in one decode batch."""
    max_sessions: PositiveInt = 256
    """KV caches kept, running requests and idle trajectories together."""
    max_batch_tokens: PositiveInt = 2048
    """Prefill tokens in one engine step; longer prompts are prefilled in chunks."""


class RolloutConfig(Config):
    engine: TorchEngineConfig = TorchEngineConfig()
    temperature: PositiveFloat = 1.0
    """Sampling temperature in training; log-probabilities are of the distribution at this temperature."""
    evaluation_temperature: NonNegativeFloat = 1.0
    """Sampling temperature in evaluation; 0 takes the most probable token."""
    generate_limit_s: PositiveFloat = 600.0
    """A turn's generation that takes longer ends the trajectory with `generation_error`."""
