"""The Megatron trainer: tensor, pipeline, expert and data parallel, on Megatron's schedule and optimiser."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from tasks.train.algorithms.base import Algorithm
from tasks.train.checkpoint import Checkpoints
from tasks.train.config import MegatronTrainerConfig
from tasks.train.sequences import PreparedBatch
from tasks.train.trainers.batches import BatchCutter, MiniBatchTensors
from tasks.train.trainers.megatron.conversion import Conversion, Reader, local_parameters
from tasks.train.trainers.megatron.cpu_shims import megatron_device
from tasks.train.trainers.megatron.export import Exporter
from tasks.train.trainers.megatron.masters import Masters
from tasks.train.trainers.megatron.model import (
    build_stage,
    check_parallelism,
    initialize_parallelism,
    read_model_config,
    transformer_config,
)
from tasks.train.trainers.megatron.saving import read_checkpoint, write_checkpoint
from tasks.train.trainers.megatron.schedule import accumulate, score, sum_gradients
from tasks.train.trainers.megatron.scoring import StageScorer
from tasks.train.trainers.megatron.weight_files import ModelDirectory
from tasks.train.trainers.meter import Meter
from tasks.train.trainers.schedule import learning_rate_share


class MegatronTrainer:
    """Trains the model in `directory` (Hugging Face format, safetensors) as `config` says.

    Every rank makes one, after torch.distributed is initialised with `config.processes` ranks (gloo on CPU,
    gloo and nccl on CUDA), and calls the same methods in the same order. `temperature` is
    that of the rollouts, `steps` the campaign's. What is trained is that of `TorchTrainer`: the same losses,
    schedule, clipping and weight decay (on every parameter). No dropout is applied.

    In bfloat16 the masters are float32 and start from the directory's own precision.

    Raises `UnsupportedModel`, and ValueError when torch.distributed has another number of ranks.
    """

    def __init__(
        self,
        directory: str | Path,
        config: MegatronTrainerConfig,
        *,
        temperature: float,
        seed: int = 0,
        steps: int = 0,
    ):
        if not dist.is_initialized() or dist.get_world_size() != config.processes:
            ranks = dist.get_world_size() if dist.is_initialized() else 0
            raise ValueError(
                "train.trainer.tensor_parallel x pipeline_parallel x data_parallel is "
                f"{config.processes}, but torch.distributed has {ranks} ranks: change one of them"
            )
        torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        self.version = 0
        self.config = config
        self.device = _device()
        self._directory = directory
        self._temperature = temperature
        self._steps = steps
        self._model = read_model_config(directory)
        check_parallelism(self._model, config)
        initialize_parallelism(config, seed)
        with megatron_device():
            self._megatron = transformer_config(self._model, config)
            self._megatron.finalize_model_grads_func = sum_gradients
            stage = build_stage(self._model, self._megatron)
            self._local = local_parameters(stage)
            self._conversion = Conversion(self._model, config.tensor_parallel)
            self._conversion.mark_sharded(self._local)
            ddp_config = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=config.distributed_optimizer
            )
            self._ddp = DistributedDataParallel(self._megatron, ddp_config, self._in_precision(stage))
            self._optimizer = self._make_optimizer()
            self._masters = Masters(self._optimizer)
            self._export = Exporter(self._conversion, self._local)
            self._load(ModelDirectory(directory))
        self._cutter = BatchCutter(
            config.micro_batch_tokens,
            packing=False,
            device=self.device,
            rank=parallel_state.get_data_parallel_rank(),
            ranks=parallel_state.get_data_parallel_world_size(),
        )
        self._policy = self._scorer(stage, self._ddp)
        self._reference: StageScorer | None = None

    def train_step(self, batch: PreparedBatch, algorithm: Algorithm) -> dict[str, float]:
        """One pass over the batch in `mini_batches` optimiser steps. Metrics: see `trainers.base`.

        A step whose gradient is not finite is left out and counted. Raises `SequenceTooLong`.
        """
        learning_rate = self._set_learning_rate()
        mini_batches = self._cutter.mini_batches(batch.sequences, self.config.mini_batches)
        meter = Meter()
        with megatron_device():
            if len(mini_batches) > 1:
                self._score_proximal(mini_batches)
            for mini_batch in mini_batches:
                self._zero_gradients()
                meter.add(
                    *accumulate(self._policy, mini_batch, self._references(mini_batch, algorithm), algorithm)
                )
                self._optimizer.prepare_grads()
                norm = float(self._optimizer.get_grad_norm())
                if meter.optimizer_step(norm):
                    self._step(norm)
        self.version += 1
        return {
            **batch.metrics,
            **meter.means(sum(mini_batch.counts.tokens for mini_batch in mini_batches), len(mini_batches)),
            "train/learning_rate": learning_rate,
            "train/sequences": float(len(batch.sequences)),
        }

    def loss_and_gradients(
        self, batch: PreparedBatch, algorithm: Algorithm
    ) -> tuple[float, dict[str, Tensor]]:
        """As `trainers.base` has it, on rank 0; on the others the loss, and no gradients."""
        loss = 0.0
        with megatron_device():
            self._zero_gradients()
            for mini_batch in self._cutter.mini_batches(batch.sequences, 1):
                references = self._references(mini_batch, algorithm)
                loss += float(accumulate(self._policy, mini_batch, references, algorithm)[0].loss)
                self._gather_gradients()
            gradients = {
                name: gradient.cpu().clone() for name, gradient in self._export(_gradient, torch.float32)
            }
            self._zero_gradients()
        return loss, gradients

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights in the compute dtype by Hugging Face name, on rank 0; nothing on the others.

        Collective: every rank iterates to the end.
        """
        yield from self._export(lambda parameter: parameter, self._megatron.params_dtype)

    def save(self, checkpoints: Checkpoints) -> None:
        """Weights by Hugging Face name in float32, and a part of the optimiser's state from each rank."""
        weights = self._export(self._masters.get, torch.float32)
        write_checkpoint(checkpoints, self.version, self._model, self.config, weights, self._optimizer)

    def restore(self, checkpoints: Checkpoints) -> bool:
        """Continue from the newest complete checkpoint; False when there is none.

        Bit for bit under the parallelism that saved it. Under another one the weights are the same and the
        optimiser's moments start anew. Raises `CheckpointMismatch`, `CorruptCheckpoint`.
        """
        found = read_checkpoint(checkpoints, self._model, self.config, self._optimizer, self._load)
        if found is None:
            return False
        self.version = found
        return True

    def _in_precision(self, stage: GPTModel) -> nn.Module:
        return Float16Module(self._megatron, stage) if self._megatron.bf16 else stage

    def _scorer(self, stage: GPTModel, wrapped: nn.Module) -> StageScorer:
        return StageScorer(stage, wrapped, vocabulary=self._model.vocab_size, temperature=self._temperature)

    def _make_optimizer(self) -> ChainedOptimizer:
        config = OptimizerConfig(
            optimizer="adam",
            lr=self.config.learning_rate,
            adam_beta1=self.config.betas[0],
            adam_beta2=self.config.betas[1],
            weight_decay=self.config.weight_decay,
            bf16=self._megatron.bf16,
            params_dtype=self._megatron.params_dtype,
            use_distributed_optimizer=self.config.distributed_optimizer,
            clip_grad=self.config.max_gradient_norm,
        )
        # Without overrides Megatron would leave norms and biases out of the weight decay.
        optimizer: ChainedOptimizer = get_megatron_optimizer(
            config, [self._ddp], config_overrides={}, use_gloo_process_groups=False
        )
        return optimizer

    @torch.no_grad()
    def _load(self, read: Reader) -> None:
        part = parallel_state.get_tensor_model_parallel_rank()
        for name, parameter in self._local.items():
            shard = self._conversion.shard(self._conversion.parameters[name], read, part)
            self._masters.set(parameter, shard.to(self.device, torch.float32))

    def _set_learning_rate(self) -> float:
        learning_rate = self.config.learning_rate * learning_rate_share(
            self.version,
            warm_up_steps=self.config.warm_up_steps,
            final_share=self.config.final_learning_rate_share,
            steps=self._steps,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate

    def _score_proximal(self, mini_batches: list[MiniBatchTensors]) -> None:
        for mini_batch in mini_batches:
            scores = score(self._policy, mini_batch.micro_batches)
            # Only the last stage has scores, and needs them.
            for micro_batch, logprobs_BT in zip(mini_batch.micro_batches, scores, strict=False):
                micro_batch.proximal_logprobs_BT = logprobs_BT

    def _references(self, mini_batch: MiniBatchTensors, algorithm: Algorithm) -> list[Tensor]:
        return score(self._frozen(), mini_batch.micro_batches) if algorithm.needs_reference else []

    @torch.no_grad()
    def _frozen(self) -> StageScorer:
        if self._reference is None:
            stage = build_stage(self._model, self._megatron).requires_grad_(False)
            read, part = ModelDirectory(self._directory), parallel_state.get_tensor_model_parallel_rank()
            for name, parameter in local_parameters(stage).items():
                parameter.copy_(self._conversion.shard(self._conversion.parameters[name], read, part))
            self._reference = self._scorer(stage, self._in_precision(stage))
        return self._reference

    def _zero_gradients(self) -> None:
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _step(self, norm: float) -> None:
        for optimizer in self._optimizer.chained_optimizers:
            parameters = optimizer.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, self.config.max_gradient_norm, norm)
        self._optimizer.step_with_ready_grads()

    def _gather_gradients(self) -> None:
        """Give every data-parallel rank the whole gradient; the distributed optimiser leaves it a shard."""
        if not self.config.distributed_optimizer:
            return
        for buffer in (*self._ddp.buffers, *self._ddp.expert_parallel_buffers):
            group: Any = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


def _device() -> torch.device:
    """This process's accelerator, by its local rank; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient: Tensor = getattr(parameter, "main_grad")  # noqa: B009
    return gradient
