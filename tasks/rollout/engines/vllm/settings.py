"""What the engine service tells the vLLM server's process, and the command line that it makes of it.

Imported in both environments: it needs pydantic only.
"""

import json
from pathlib import Path

from pydantic import PositiveInt

from infra.config import Config
from tasks.rollout.config import VllmEngineConfig
from tasks.rollout.routing import WorkerRole

MODEL_NAME = "policy"
_PACKAGE = "tasks.rollout.engines.vllm"


class VllmServerSettings(Config):
    """Written to the process's standard input as one JSON line."""

    model: Path
    """Directory in Hugging Face format."""
    max_context: PositiveInt
    engine: VllmEngineConfig
    token: str
    """What every request must present as its bearer token."""
    role: WorkerRole = "both"
    """Whether it hands KV over, and which way."""


def arguments(settings: VllmServerSettings, *, cpu: bool) -> list[str]:
    """Command line of `vllm serve` for these settings; `cpu` says that it is a CPU build.

    A CPU build may not prefill in chunks: the draw that a chunk discards cannot be taken back from a CPU
    generator, and vLLM would end with an error on the first such request that has a seed. Nor may its workers
    spin on the cores that the API server needs (`patient.py`).
    """
    engine = settings.engine
    batch_tokens = max(engine.max_batch_tokens, settings.max_context) if cpu else engine.max_batch_tokens
    options: dict[str, object] = {
        "model": settings.model,
        "served-model-name": MODEL_NAME,
        "host": "127.0.0.1",
        "port": 0,
        "middleware": f"{_PACKAGE}.door.Door",
        "worker-extension-cls": f"{_PACKAGE}.worker_extension.PublishedWeights",
        "tokens-only": True,
        "generation-config": "vllm",  # the directory's own would change temperature and top-p
        "logprobs-mode": "processed_logprobs",
        "max-model-len": settings.max_context,
        "max-num-seqs": engine.max_running,
        "max-num-batched-tokens": batch_tokens,
        "dtype": engine.dtype,
        "tensor-parallel-size": engine.tensor_parallel,
        "enforce-eager": engine.enforce_eager,
        "enable-chunked-prefill": not cpu,
        "disable-uvicorn-access-log": True,
    }
    if cpu and engine.tensor_parallel == 1:
        # In the engine core's process. By its short name, `uni`, vLLM would take `mp` on CPUs.
        options["distributed-executor-backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    elif cpu:
        options["distributed-executor-backend"] = f"{_PACKAGE}.patient.PatientExecutor"
        options["worker-extension-cls"] = f"{_PACKAGE}.patient.PatientPublishedWeights"
    if settings.role != "both":
        options["kv-transfer-config"] = json.dumps(
            {
                "kv_connector": "FolderConnector",
                "kv_connector_module_path": f"{_PACKAGE}.kv_connector",
                "kv_role": "kv_producer" if settings.role == "prefill" else "kv_consumer",
                "kv_load_failure_policy": "recompute",
            }
        )
    if engine.kv_cache_gib is not None:
        options["kv-cache-memory-bytes"] = int(engine.kv_cache_gib * 2**30)
    elif not cpu:
        options["gpu-memory-utilization"] = engine.gpu_memory_utilization
    words = []
    for name, value in {**options, **engine.extra_arguments}.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return words
