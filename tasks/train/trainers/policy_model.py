"""The model that a torch trainer trains: loaded, adapted, and sharded where there are several ranks."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tasks.train.config import TorchTrainerConfig
from tasks.train.trainers.fsdp import load_sharded
from tasks.train.trainers.layers import checkpoint_activations
from tasks.train.trainers.linear import use_onednn
from tasks.train.trainers.lora import add_adapters
from tasks.train.trainers.packed_attention import use_packed_attention


def load_policy(
    directory: str | Path, config: TorchTrainerConfig, device: torch.device, *, seed: int, trained: bool
) -> PreTrainedModel:
    """The model in `directory`, with float32 parameters, on the device; frozen unless it is to be `trained`.

    With more than one process each rank holds its shard, and the call is collective.
    """

    def build(with_weights: bool) -> PreTrainedModel:
        model = _with_weights(directory) if with_weights else _without_weights(directory)
        model.eval()
        if config.packing:
            use_packed_attention(model)
        # Its products are float32: autocast and FSDP's bfloat16 would not reach them.
        if config.compute_dtype == "float32" and device.type == "cpu":
            use_onednn(model)
        if not trained:
            model.requires_grad_(False)
            return model
        if config.lora is not None:
            add_adapters(model, config.lora, seed)
        if config.activation_checkpointing:
            checkpoint_activations(model)
        return model

    if config.processes == 1:
        whole: PreTrainedModel = build(True).to(device)  # type: ignore[arg-type]
        return whole
    mesh = init_device_mesh(device.type, (config.processes,))
    return load_sharded(build, mesh, getattr(torch, config.compute_dtype))


def _with_weights(directory: str | Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, use_safetensors=True
    )
    return model


def _without_weights(directory: str | Path) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory), dtype=torch.float32
        )
    model.tie_weights()
    return model
