"""The torch trainer: a Hugging Face causal language model and AdamW, in one process or over several."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.train.algorithms.base import Algorithm
from tasks.train.checkpoint import Checkpoints, PartEntry
from tasks.train.config import TorchTrainerConfig
from tasks.train.losses import BatchCounts
from tasks.train.process_group import gather_json, rank, ranks
from tasks.train.sequences import PreparedBatch
from tasks.train.trainers.batches import BatchCutter, MicroBatchTensors, MiniBatchTensors
from tasks.train.trainers.file_names import as_in_files
from tasks.train.trainers.fsdp import full, own
from tasks.train.trainers.logprobs import TokenLogprobs
from tasks.train.trainers.lora import DOWN, UP, adapters_off, merged
from tasks.train.trainers.meter import Meter
from tasks.train.trainers.policy_model import load_policy
from tasks.train.trainers.schedule import learning_rate_share
from tasks.train.trainers.state import (
    moments_of,
    part_names,
    random_state,
    restore_state,
    set_random_state,
    steps_of,
)


class TorchTrainer:
    """Trains the model in `directory` (Hugging Face format, safetensors) as `config` says.

    `temperature` is that of the rollouts, `steps` the campaign's, over which the learning rate falls. An
    algorithm that needs a reference policy gets the model as it is in `directory`, frozen, and loaded when
    first asked for (under LoRA it is the model itself with its adapters off). Sets the process's number of
    torch threads and seeds torch. No dropout is applied: the engine that sampled applied none. Two runs on
    the same machine and number of threads are equal bit for bit.

    Parameters, gradients and moments are float32. With `compute_dtype` bfloat16 one process computes under
    autocast, which keeps norms and softmax in float32; several gather their parameters in bfloat16 and
    compute in it throughout (FSDP2), reducing gradients in float32.

    With `config.processes` above 1 it is one rank of that many, in an initialised process group, and every
    method is collective. Trained sequences are shared out to the ranks; losses are divided by counts of the
    whole batch, so they depend neither on the number of ranks nor on that of micro-batches. Raises ValueError
    when the process group has another size.
    """

    def __init__(
        self,
        directory: str | Path,
        config: TorchTrainerConfig,
        *,
        temperature: float,
        seed: int = 0,
        steps: int = 0,
        device: str | torch.device | None = None,
    ):
        torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        self.version = 0
        self.config = config
        self.device = _device() if device is None else torch.device(device)
        self._rank, self._ranks = _place(config)
        self._directory = directory
        self._temperature = temperature
        self._seed = seed
        self._steps = steps
        self._cutter = BatchCutter(
            config.micro_batch_tokens, config.packing, self.device, self._rank, self._ranks
        )
        self.model = self._load_model(trained=True)
        self._policy = TokenLogprobs(self.model, temperature)
        self._reference: TokenLogprobs | None = None
        self._parameters = {
            name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def train_step(self, batch: PreparedBatch, algorithm: Algorithm) -> dict[str, float]:
        """One pass over the batch in `mini_batches` optimiser steps. Metrics: see `trainers.base`.

        A step whose gradient is not finite is left out and counted. Raises `SequenceTooLong`.
        """
        learning_rate = self._set_learning_rate()
        mini_batches = self._cutter.mini_batches(batch.sequences, self.config.mini_batches)
        if len(mini_batches) > 1:
            self._score_proximal(mini_batches)
        meter = Meter()
        for mini_batch in mini_batches:
            self._optimizer.zero_grad(set_to_none=True)
            for micro_batch in mini_batch.micro_batches:
                self._accumulate(micro_batch, mini_batch.counts, algorithm, meter)
            norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self.config.max_gradient_norm)
            if meter.optimizer_step(float(full(norm))):
                self._optimizer.step()
        if self._ranks > 1:
            meter.gather()
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
        """Loss of the whole batch and the gradient of every trained parameter; see `trainers.base`.

        Adapters are named as their layer's weight is, with `lora_A` and `lora_B` in place of `weight`.
        """
        meter = Meter()
        self._optimizer.zero_grad(set_to_none=True)
        mini_batches = self._cutter.mini_batches(batch.sequences, 1)
        for mini_batch in mini_batches:
            for micro_batch in mini_batch.micro_batches:
                self._accumulate(micro_batch, mini_batch.counts, algorithm, meter)
        if self._ranks > 1:
            meter.gather()
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.update(as_in_files(self.model, name, full(gradient).detach().cpu()))
        self._optimizer.zero_grad(set_to_none=True)
        return meter.means(0, len(mini_batches))["train/loss"], gradients

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers by Hugging Face name; of tied ones the first name.

        Adapters are merged into the weights that they adapt.
        """
        state = self.model.state_dict(keep_vars=True)
        seen: set[int] = set()
        for name, tensor in state.items():
            prefix, _, last = name.rpartition(".")
            if id(tensor) in seen or last in (DOWN, UP):
                continue
            seen.add(id(tensor))
            weight = full(tensor.detach())
            if last == "weight" and f"{prefix}.{UP}" in state:
                assert self.config.lora is not None
                down, up = (full(state[f"{prefix}.{part}"].detach()) for part in (DOWN, UP))
                weight = merged(weight, down, up, self.config.lora.alpha / self.config.lora.rank)
            yield from as_in_files(self.model, name, weight)

    def save(self, checkpoints: Checkpoints) -> None:
        """Each rank writes its part; rank 0 completes the checkpoint once all are there."""
        if self._rank == 0:
            checkpoints.begin(self.version)
        gather_json(None)  # nobody writes before what was there is gone
        model, optimizer = part_names(self._rank, self._ranks)
        weights = {name: own(tensor.detach()) for name, tensor in self._kept().items()}
        written = [
            checkpoints.put_part(self.version, model, weights),
            checkpoints.put_part(self.version, optimizer, moments_of(self._parameters, self._optimizer)),
        ]
        everyone = gather_json(
            {"parts": [asdict(part) for part in written], "random": random_state(self.device)}
        )
        if self._rank == 0:
            checkpoints.complete(
                self.version,
                [PartEntry(**part) for one in everyone for part in one["parts"]],
                {
                    "ranks": self._ranks,
                    "shapes": {name: list(tensor.shape) for name, tensor in self._kept().items()},
                    "optimizer_steps": steps_of(self._parameters, self._optimizer),
                    "random": [one["random"] for one in everyone],
                },
            )
        gather_json(None)  # a rank that returns may rely on the checkpoint

    def restore(self, checkpoints: Checkpoints) -> bool:
        """From a checkpoint of as many ranks bit for bit; of another number the same state, resharded."""
        if not checkpoints.steps():
            return False
        checkpoint = restore_state(
            checkpoints,
            self._kept(),
            self._parameters,
            self._optimizer,
            rank=self._rank,
            ranks=self._ranks,
        )
        states = checkpoint.state["random"]
        set_random_state(states[self._rank] if self._rank < len(states) else states[0], self.device)
        self.version = checkpoint.step
        return True

    def _kept(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of the model: what is trained, and persistent buffers."""
        persistent = self.model.state_dict(keep_vars=True)
        buffers = {name: tensor for name, tensor in self.model.named_buffers() if name in persistent}
        return {**self._parameters, **buffers}

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

    @torch.no_grad()
    def _score_proximal(self, mini_batches: list[MiniBatchTensors]) -> None:
        for mini_batch in mini_batches:
            for micro_batch in mini_batch.micro_batches:
                micro_batch.proximal_logprobs_BT, _ = self._score(self._policy, micro_batch)

    @torch.no_grad()
    def _score_reference(self, micro_batch: MicroBatchTensors) -> Tensor:
        if self.config.lora is not None:
            with adapters_off(self.model):
                return self._score(self._policy, micro_batch)[0]
        if self._reference is None:
            frozen = self._load_model(trained=False)
            self._reference = TokenLogprobs(frozen, self._temperature)
        return self._score(self._reference, micro_batch)[0]

    def _score(
        self, model: TokenLogprobs, micro_batch: MicroBatchTensors, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        with self._precision():
            return model(
                micro_batch.tokens_BT,
                micro_batch.mask_BT,
                packed=micro_batch.packed,
                entropy_gradient=entropy_gradient,
            )

    def _precision(self) -> AbstractContextManager[Any]:
        if self._ranks > 1 or self.config.compute_dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _load_model(self, *, trained: bool) -> PreTrainedModel:
        return load_policy(self._directory, self.config, self.device, seed=self._seed, trained=trained)

    def _accumulate(
        self, micro_batch: MicroBatchTensors, counts: BatchCounts, algorithm: Algorithm, meter: Meter
    ) -> None:
        """Forward, loss and backward of one micro-batch; gradients add up in the parameters."""
        reference_BT = self._score_reference(micro_batch) if algorithm.needs_reference else None
        logprobs_BT, entropy_BT = self._score(
            self._policy, micro_batch, entropy_gradient=algorithm.differentiates_entropy
        )
        terms = algorithm.loss(micro_batch.loss_inputs(logprobs_BT, entropy_BT, reference_BT, counts))
        terms.loss.backward()
        meter.add(terms, micro_batch.read_tokens)


def _device() -> torch.device:
    """This process's accelerator, by its local rank; the CPU where there is none."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _place(config: TorchTrainerConfig) -> tuple[int, int]:
    """(rank, ranks). Raises ValueError when the process group is not the one that `config` asks for."""
    if config.processes == 1:
        return 0, 1
    if ranks() != config.processes:
        raise ValueError(
            f"train.trainer.processes is {config.processes}, but the process group has {ranks()}: start the "
            "trainer as a service, which starts its ranks, or under torchrun with as many processes"
        )
    return rank(), ranks()
