"""What a campaign says of generation: sampling and inference engines."""

import shutil
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from infra.config import Config


class EngineUnavailable(ValueError):
    """This machine cannot run the engine that the campaign asks for. The message names the option."""


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
    start_limit_s: PositiveFloat = 120.0
    """A worker that does not serve after this time has failed to start."""

    def require_available(self) -> None:
        """Raise `EngineUnavailable` where this machine lacks what the engine needs: never, for this one."""


class VllmEngineConfig(Config):
    """A vLLM server a worker, in an environment of its own. `make vllm` builds it."""

    kind: Literal["vllm"]
    workers: PositiveInt = 1
    """vLLM servers; the proxy balances between them. Each takes `tensor_parallel` devices."""
    threads: PositiveInt = 1
    """Torch threads of each of a server's worker processes; what a CPU build computes with."""
    python: str = ".venv-vllm/bin/python"
    """Interpreter of the environment that has vLLM; a relative path is relative to the working directory."""
    tensor_parallel: PositiveInt = 1
    """Devices (on a CPU build: processes) over which each layer is split. It must divide the model's
    attention heads."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV; `auto` takes the model directory's. Log-probabilities are float32 in any case."""
    max_running: PositiveInt = 64
    """Requests in one decode batch."""
    max_batch_tokens: PositiveInt = 2048
    """Tokens in one engine step. A CPU build prefills no prompt in chunks, and raises this to the context."""
    kv_cache_gib: PositiveFloat | None = None
    """Memory of each worker process for KV; empty leaves it to vLLM (`gpu_memory_utilization`)."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that vLLM takes, where `kv_cache_gib` is empty."""
    enforce_eager: bool = True
    """Run without compilation and CUDA graphs: a faster start. On GPUs, off generates faster."""
    start_limit_s: PositiveFloat = 600.0
    """A worker that does not serve after this time has failed to start."""
    extra_arguments: dict[str, str | int | float | bool] = {}
    """Further options of `vllm serve`, by their names: `{"block-size": 32, "async-scheduling": false}`."""

    @field_validator("extra_arguments")
    @classmethod
    def _leaves_our_options_alone(cls, value: dict[str, str | int | float | bool]) -> dict[str, object]:
        ours = sorted(name for name in value if _plain(name) in RESERVED_ARGUMENTS)
        if ours:
            raise ValueError(
                f"{', '.join(ours)} cannot be set here: Tutti sets them, from rollout.engine's other options "
                "where there is one"
            )
        return dict(value)

    @property
    def interpreter(self) -> str | None:
        """Path of the interpreter; None when there is none."""
        return shutil.which(str(Path(self.python).expanduser()))

    def require_available(self) -> None:
        """Raise `EngineUnavailable` where the interpreter is missing."""
        if self.interpreter is None:
            raise EngineUnavailable(
                f"rollout.engine.python: there is no interpreter {self.python!r}: run `make vllm`, or name "
                "the python of an environment that has vLLM"
            )


RESERVED_ARGUMENTS = frozenset(
    [
        "model",
        "served-model-name",
        "host",
        "port",
        "uds",
        "api-key",
        "api-server-count",
        "middleware",
        "tokens-only",
        "max-model-len",
        "max-num-seqs",
        "max-num-batched-tokens",
        "dtype",
        "tensor-parallel-size",
        "data-parallel-size",
        "kv-cache-memory-bytes",
        "gpu-memory-utilization",
        "enforce-eager",
        "generation-config",
        "logprobs-mode",
        "worker-extension-cls",
        "enable-chunked-prefill",
        "disable-log-stats",
        "enable-request-id-headers",
        "skip-tokenizer-init",
        "tokenizer",
        "root-path",
        "config",
        "ssl-keyfile",
        "ssl-certfile",
    ]
)
"""Options of `vllm serve` that are Tutti's to set, or that its use of vLLM rests on."""


def _plain(name: str) -> str:
    """The option that a name sets: vLLM takes underscores for dashes, and `no-` before a switch."""
    return name.replace("_", "-").removeprefix("no-")


EngineConfig = Annotated[TorchEngineConfig | VllmEngineConfig, Field(discriminator="kind")]


class RolloutConfig(Config):
    engine: EngineConfig = TorchEngineConfig()
    """Of kind `torch` (embedded; the default) or `vllm`."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature in training; log-probabilities are of the distribution at this temperature."""
    evaluation_temperature: NonNegativeFloat = 1.0
    """Sampling temperature in evaluation; 0 takes the most probable token."""
    generate_limit_s: PositiveFloat = 600.0
    """A turn's generation that takes longer ends the trajectory with `generation_error`."""

    @model_validator(mode="after")
    def _vllm_samples_at_these_temperatures(self) -> "RolloutConfig":
        if self.engine.kind == "vllm":
            for option in ("temperature", "evaluation_temperature"):
                if getattr(self, option) > 2:
                    raise ValueError(
                        f"rollout.{option} ({getattr(self, option)}) is above 2, which vLLM refuses: lower it"
                    )
        return self

    @field_validator("engine", mode="before")
    @classmethod
    def _embedded_by_default(cls, value: object) -> object:
        return {"kind": "torch", **value} if isinstance(value, dict) else value
