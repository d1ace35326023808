"""What each rank of the parity test does: the loss and the gradients of one batch under every way to split.

    torchrun --nproc-per-node 2 -m tests.train.trainers.parity_ranks MODELS RESULTS

Runs the cases that take as many processes as there are.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed

from tasks.train.algorithms.grpo import Grpo
from tasks.train.config import GrpoConfig, MegatronTrainerConfig, TorchTrainerConfig
from tasks.train.sequences import PreparedBatch
from tasks.train.trainers import make_trainer
from tests.train.trainers.batches import random_trajectories

TEMPERATURE = 0.8
MICRO_BATCH_TOKENS = 60  # so that the batch takes several passes

_FSDP2 = TorchTrainerConfig(processes=2, micro_batch_tokens=MICRO_BATCH_TOKENS)


def _megatron(**options: object) -> MegatronTrainerConfig:
    return MegatronTrainerConfig.model_validate({"micro_batch_tokens": MICRO_BATCH_TOKENS, **options})


CASES: dict[str, tuple[str, TorchTrainerConfig | MegatronTrainerConfig]] = {
    "FSDP2 x2, llama": ("llama", _FSDP2),
    "FSDP2 x2, qwen3_moe": ("qwen3_moe", _FSDP2),
    "Megatron TP2, llama": ("llama", _megatron(tensor_parallel=2)),
    "Megatron TP2 with sequence parallel and checkpointing, llama": (
        "llama",
        _megatron(tensor_parallel=2, sequence_parallel=True, activation_checkpointing=True),
    ),
    "Megatron TP2, untied llama": ("untied", _megatron(tensor_parallel=2)),
    "Megatron TP2, qwen2": ("qwen2", _megatron(tensor_parallel=2)),
    "Megatron TP2, qwen3": ("qwen3", _megatron(tensor_parallel=2)),
    "Megatron TP2 with sequence parallel, qwen3_moe": (
        "qwen3_moe",
        _megatron(tensor_parallel=2, sequence_parallel=True),
    ),
    "Megatron PP2, llama": ("llama", _megatron(pipeline_parallel=2)),
    "Megatron PP2, untied llama": ("untied", _megatron(pipeline_parallel=2)),
    "Megatron PP2, qwen3_moe": ("qwen3_moe", _megatron(pipeline_parallel=2)),
    "Megatron DP2, llama": ("llama", _megatron(data_parallel=2)),
    "Megatron DP2 without distributed optimiser, llama": (
        "llama",
        _megatron(data_parallel=2, distributed_optimizer=False),
    ),
    "Megatron EP2, qwen3_moe": ("qwen3_moe", _megatron(data_parallel=2, expert_parallel=2)),
    "Megatron TP2 x PP2, llama": ("llama", _megatron(tensor_parallel=2, pipeline_parallel=2)),
    "Megatron PP2 x DP2, untied llama": ("untied", _megatron(pipeline_parallel=2, data_parallel=2)),
    "Megatron TP2 x EP2 with sequence parallel, qwen3_moe": (
        "qwen3_moe",
        _megatron(tensor_parallel=2, sequence_parallel=True, data_parallel=2, expert_parallel=2),
    ),
    "Megatron EP2, unnormalised_moe": ("unnormalised_moe", _megatron(data_parallel=2, expert_parallel=2)),
}


def parity_algorithm() -> Grpo:
    return Grpo(GrpoConfig(importance_cap=1.2, entropy_coefficient=0.01))


def parity_batch() -> PreparedBatch:
    """16 sequences of 4 to 20 tokens in four groups, with the advantages of GRPO."""
    return parity_algorithm().prepare(random_trajectories())


def main(models: Path, results: Path) -> None:
    distributed.init_process_group("gloo")
    for case, (family, config) in CASES.items():
        if config.processes != distributed.get_world_size():
            continue
        trainer = make_trainer(config, models / family, temperature=TEMPERATURE, seed=0, steps=0)
        loss, gradients = trainer.loss_and_gradients(parity_batch(), parity_algorithm())
        if distributed.get_rank() == 0:
            tensors = {**gradients, "loss": torch.tensor(loss, dtype=torch.float64)}
            # Tensors of one memory cannot share a file.
            save_file(
                {name: tensor.clone() for name, tensor in tensors.items()}, results / f"{case}.safetensors"
            )
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
