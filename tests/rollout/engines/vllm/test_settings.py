import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tasks.rollout.config import EngineUnavailable, RolloutConfig, TorchEngineConfig, VllmEngineConfig
from tasks.rollout.engines.vllm.settings import VllmServerSettings, arguments
from tasks.rollout.routing import WorkerRole


def words(cpu: bool, role: WorkerRole = "both", **engine: Any) -> list[str]:
    config = VllmEngineConfig(kind="vllm", **engine)
    settings = VllmServerSettings(
        model=Path("/a model"), max_context=4096, engine=config, token="secret", role=role
    )
    return arguments(settings, cpu=cpu)


def value(of: list[str], option: str) -> str:
    return of[of.index(option) + 1]


def test_the_options_reach_vllm_under_its_names() -> None:
    found = words(False, tensor_parallel=4, dtype="bfloat16", max_running=9, max_batch_tokens=77)
    assert value(found, "--model") == "/a model"
    assert value(found, "--tensor-parallel-size") == "4"
    assert value(found, "--dtype") == "bfloat16"
    assert value(found, "--max-num-seqs") == "9"
    assert value(found, "--max-num-batched-tokens") == "77"
    assert value(found, "--max-model-len") == "4096"
    assert value(found, "--gpu-memory-utilization") == "0.9"
    assert value(found, "--logprobs-mode") == "processed_logprobs"
    assert value(found, "--host") == "127.0.0.1"
    assert "--enable-chunked-prefill" in found


def test_a_cpu_build_prefills_every_prompt_whole() -> None:
    found = words(True, max_batch_tokens=512)
    assert "--no-enable-chunked-prefill" in found
    assert value(found, "--max-num-batched-tokens") == "4096"


def test_workers_spin_only_beside_gpus() -> None:
    assert value(words(True), "--distributed-executor-backend").endswith(".UniProcExecutor")
    assert value(words(True, tensor_parallel=2), "--distributed-executor-backend").endswith(
        ".PatientExecutor"
    )
    assert "--distributed-executor-backend" not in words(False, tensor_parallel=2)


def test_the_token_does_not_show_in_the_command_line() -> None:
    assert not any("secret" in word for word in words(True))


def test_kv_memory_is_given_in_bytes_and_replaces_the_share() -> None:
    found = words(False, kv_cache_gib=1.5)
    assert value(found, "--kv-cache-memory-bytes") == str(3 * 2**29)
    assert "--gpu-memory-utilization" not in found


def test_a_worker_hands_kv_over_only_in_a_role() -> None:
    assert "--kv-transfer-config" not in words(True)
    roles: dict[WorkerRole, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
    for cpu in (True, False):
        for role, named in roles.items():
            found = json.loads(value(words(cpu, role=role), "--kv-transfer-config"))
            assert found["kv_role"] == named
            module = importlib.util.find_spec(found["kv_connector_module_path"])
            assert module is not None
            assert module.origin is not None
            assert f"class {found['kv_connector']}(" in Path(module.origin).read_text()
            assert found["kv_load_failure_policy"] == "recompute"


def test_further_options_are_passed_on() -> None:
    extra = {"block-size": 32, "enable-expert-parallel": True, "async-scheduling": False, "seed": 3}
    found = words(False, extra_arguments=extra)
    assert value(found, "--block-size") == "32"
    assert "--enable-expert-parallel" in found
    assert "--no-async-scheduling" in found
    assert value(found, "--seed") == "3"


@pytest.mark.parametrize("name", ["host", "port", "middleware", "api-key", "worker-extension-cls", "model"])
def test_what_tutti_sets_cannot_be_set_past_it(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} cannot be set here"):
        VllmEngineConfig(kind="vllm", extra_arguments={name: "x"})


def test_an_option_is_refused_in_underscores_and_with_no_too() -> None:
    for name in ("worker_extension_cls", "no-enforce-eager", "no_enable_chunked_prefill"):
        with pytest.raises(ValidationError, match="cannot be set here"):
            VllmEngineConfig(kind="vllm", extra_arguments={name: True})


def test_an_engine_is_of_one_kind_and_embedded_by_default() -> None:
    assert RolloutConfig().engine == TorchEngineConfig()
    assert RolloutConfig.model_validate({"engine": {"threads": 2}}).engine == TorchEngineConfig(threads=2)
    chosen = RolloutConfig.model_validate({"engine": {"kind": "vllm", "workers": 3}}).engine
    assert chosen == VllmEngineConfig(kind="vllm", workers=3)
    with pytest.raises(ValidationError, match="tensor_parallel"):
        RolloutConfig.model_validate({"engine": {"kind": "torch", "tensor_parallel": 2}})
    with pytest.raises(ValidationError, match="kind"):
        RolloutConfig.model_validate({"engine": {"kind": "sglang"}})


def test_a_temperature_that_vllm_refuses_is_refused_first() -> None:
    engine = {"kind": "vllm"}
    RolloutConfig.model_validate({"engine": engine, "temperature": 2.0, "evaluation_temperature": 2.0})
    RolloutConfig.model_validate({"temperature": 2.5})
    for option in ("temperature", "evaluation_temperature"):
        with pytest.raises(ValidationError, match=rf"rollout\.{option} \(2\.5\) is above 2"):
            RolloutConfig.model_validate({"engine": engine, option: 2.5})


def test_a_config_survives_its_own_dump() -> None:
    config = RolloutConfig(engine=VllmEngineConfig(kind="vllm", extra_arguments={"seed": 3, "a": True}))
    assert RolloutConfig.model_validate(config.model_dump(mode="json")) == config


def test_only_a_missing_interpreter_makes_an_engine_unavailable(tmp_path: Path) -> None:
    TorchEngineConfig().require_available()
    python = tmp_path / "python"
    config = VllmEngineConfig(kind="vllm", python=str(python))
    with pytest.raises(EngineUnavailable, match=r"rollout\.engine\.python.*make vllm"):
        config.require_available()
    python.write_text("#!/bin/sh\n")
    with pytest.raises(EngineUnavailable):
        config.require_available()  # not executable
    python.chmod(0o755)
    config.require_available()
    assert config.interpreter == str(python)
