"""What a campaign says of generation: sampling and inference engines."""

import shutil
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from infra.config import Config
from tasks.rollout.routing import WorkerRole


class EngineUnavailable(ValueError):
    """This machine cannot run the engine that the campaign asks for. The message names the option."""


class PrefillDecodeConfig(Config):
    """How workers share out a turn: some prefill contexts, the others fetch that KV from them and decode."""

    prefill_workers: NonNegativeInt = 0
    """Of `workers`, so many only prefill; 0 leaves prefill and decode together on every worker."""
    min_prefill_tokens: PositiveInt = 128
    """A turn goes through a prefill worker if at least so many tokens of its context have no KV on the worker
    that decodes it. Below, handing over costs more than it spares."""
    kv_limit_s: PositiveFloat = 20.0
    """KV that another worker does not hand over in this time is computed where it is needed."""

    @model_validator(mode="after")
    def _leaves_workers_to_decode(self) -> Self:
        workers: int = getattr(self, "workers", 1)
        if self.prefill_workers >= workers and self.prefill_workers:
            raise ValueError(
                f"prefill_workers ({self.prefill_workers}) must be below workers ({workers}), so that "
                "one decodes at least: lower the one or raise the other"
            )
        return self


_ALL_TOGETHER = PrefillDecodeConfig()


class TorchEngineConfig(PrefillDecodeConfig):
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


class VllmEngineConfig(PrefillDecodeConfig):
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


class SimulatedEngineConfig(Config):
    """No model: real batching with injected durations, and tokens drawn from the requests' seeds. It shows
    what a control plane does with engines that this machine does not have."""

    kind: Literal["simulated"]
    workers: PositiveInt = 1
    """Engine processes; the proxy balances between them."""
    threads: PositiveInt = 1
    """Of each worker; it computes nothing, so 1 is enough."""
    max_running: PositiveInt = 64
    """Requests in one decode batch."""
    max_sessions: PositiveInt = 256
    """KV caches counted as kept, running requests and idle trajectories together."""
    max_batch_tokens: PositiveInt = 2048
    """Prefill tokens in one engine step; longer prompts are prefilled in chunks."""
    prefill_s_per_token: NonNegativeFloat = 0.0
    """Seconds for each token of context that is computed, recomputed ones included."""
    decode_s: NonNegativeFloat = 0.01
    """Seconds of every engine step."""
    decode_s_per_sequence: NonNegativeFloat = 0.0
    """Seconds for each sequence that samples a token in a step."""
    pull_s: NonNegativeFloat = 0.0
    """Seconds to pull a version's weights, beside generation where it is published early enough. It must be
    published; its tensors are not read."""
    update_s: NonNegativeFloat = 0.0
    """Seconds to put pulled weights in place, while generation stands still."""
    end_probability: float = Field(default=0.0, ge=0, lt=1)
    """Of each sampled token: that it ends the turn. 0 samples all the tokens that a turn may have."""
    median_tokens: PositiveFloat | None = None
    """Instead of `end_probability`: the lengths of turns are log-normal, with this median."""
    tokens_sigma: PositiveFloat = 1.0
    """With `median_tokens`: the standard deviation of a length's logarithm; larger, heavier tails."""
    start_limit_s: PositiveFloat = 120.0
    """A worker that does not serve after this time has failed to start."""

    @model_validator(mode="after")
    def _one_distribution_of_lengths(self) -> "SimulatedEngineConfig":
        if self.median_tokens is not None and self.end_probability:
            raise ValueError("end_probability and median_tokens exclude each other: leave one out")
        return self

    def require_available(self) -> None:
        """Raise `EngineUnavailable` where this machine lacks what the engine needs: never, for this one."""


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
        "kv-transfer-config",
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


EngineConfig = Annotated[
    TorchEngineConfig | VllmEngineConfig | SimulatedEngineConfig, Field(discriminator="kind")
]


class RolloutConfig(Config):
    engine: EngineConfig = TorchEngineConfig()
    """Of kind `torch` (embedded; the default), `vllm` or `simulated`."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature in training; log-probabilities are of the distribution at this temperature."""
    evaluation_temperature: NonNegativeFloat = 1.0
    """Sampling temperature in evaluation; 0 takes the most probable token."""
    generate_limit_s: PositiveFloat = 600.0
    """A turn's generation that takes longer ends the trajectory with `generation_error`."""
    progress_every_s: PositiveFloat = 0.25
    """How often an engine reports what its running turns have sampled. A turn lost with its worker goes on
    elsewhere from what was reported."""
    heartbeat_limit_s: PositiveFloat = 30.0
    """An engine, or the proxy, that answers nothing for so long is taken for frozen: it is killed and started
    again. An engine step must not take longer."""
    update_limit_s: PositiveFloat = 600.0
    """An engine that has not carried out a command, such as taking new weights, after so long is lost."""
    worker_restarts: NonNegativeInt = 3
    """How often a lost engine is started again within `restart_window_s`; after that it stays set aside. The
    same holds for the proxy, whose loss then ends the run."""
    restart_window_s: PositiveFloat = 600.0
    proxy_limit_s: PositiveFloat = 300.0
    """How long an environment that waits for a turn looks for a lost proxy, which may be started again."""

    @property
    def min_prefill_tokens(self) -> int:
        """The engine's option; an engine without prefill workers does not heed it."""
        shared = self.engine if isinstance(self.engine, PrefillDecodeConfig) else _ALL_TOGETHER
        return shared.min_prefill_tokens

    @property
    def worker_roles(self) -> list[WorkerRole]:
        """What each of the engine's workers does of a turn, in their order."""
        engine = self.engine
        if not isinstance(engine, PrefillDecodeConfig) or not engine.prefill_workers:
            return ["both"] * engine.workers
        return ["prefill" if index < engine.prefill_workers else "decode" for index in range(engine.workers)]

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
