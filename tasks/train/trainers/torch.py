"""The torch trainer: one process, a Hugging Face causal language model in float32, AdamW."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tasks.train.algorithms.base import Algorithm, LossInputs
from tasks.train.checkpoint import Checkpoint, Checkpoints
from tasks.train.config import TorchTrainerConfig
from tasks.train.losses import BatchCounts
from tasks.train.micro_batches import (
    cut_micro_batches,
    pad_micro_batch,
    split_mini_batches,
    trained_tokens,
)
from tasks.train.sequences import PreparedBatch, TrainingSequence
from tasks.train.trainers.base import CheckpointMismatch
from tasks.train.trainers.linear import use_onednn
from tasks.train.trainers.logprobs import TokenLogprobs
from tasks.train.trainers.meter import Meter


@dataclass(slots=True)
class _MicroBatch:
    """One forward and backward pass, as tensors on the trainer's device."""

    tokens_BT: Tensor
    mask_BT: Tensor
    advantages_BT: Tensor
    behaviour_logprobs_BT: Tensor
    sequence_tokens_B: Tensor
    proximal_logprobs_BT: Tensor | None = None  # None: those of the pass itself, detached


@dataclass(slots=True)
class _MiniBatch:
    """One optimiser step."""

    micro_batches: list[_MicroBatch]
    counts: BatchCounts


class TorchTrainer:
    """Trains the model in `directory` (Hugging Face format, safetensors) as `config` says.

    `temperature` is that of the rollouts, `steps` the campaign's, over which the learning rate falls. An
    algorithm that needs a reference policy gets the model as it is in `directory`, frozen and loaded when
    first asked for. Sets the process's number of torch threads and seeds torch. No dropout is applied: the
    engine that sampled applied none. Two runs on the same machine and number of threads are equal bit for
    bit.
    """

    def __init__(
        self,
        directory: str | Path,
        config: TorchTrainerConfig,
        *,
        temperature: float,
        seed: int = 0,
        steps: int = 0,
        device: str | torch.device = "cpu",
    ):
        torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        self.version = 0
        self.config = config
        self.device = torch.device(device)
        self._directory = directory
        self._temperature = temperature
        self._steps = steps
        self.model = self._load_model()
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
        mini_batches = self._mini_batches(batch.sequences)
        if len(mini_batches) > 1:
            self._score_proximal(mini_batches)
        meter = Meter()
        for mini_batch in mini_batches:
            self._optimizer.zero_grad(set_to_none=True)
            for micro_batch in mini_batch.micro_batches:
                self._accumulate(micro_batch, mini_batch.counts, algorithm, meter)
            norm = float(
                torch.nn.utils.clip_grad_norm_(self._parameters.values(), self.config.max_gradient_norm)
            )
            if meter.optimizer_step(norm):
                self._optimizer.step()
        self.version += 1
        return {
            **batch.metrics,
            **meter.means(sum(mini_batch.counts.tokens for mini_batch in mini_batches), len(mini_batches)),
            "train/learning_rate": learning_rate,
            "train/sequences": float(len(batch.sequences)),
        }

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers by Hugging Face name; of tied ones the first name."""
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor.detach()

    def save(self, checkpoints: Checkpoints) -> None:
        checkpoints.save(self._checkpoint())

    def restore(self, checkpoints: Checkpoints) -> bool:
        if not checkpoints.steps():
            return False
        self._restore(checkpoints.load())
        return True

    def _checkpoint(self) -> Checkpoint:
        optimizer: dict[str, Tensor] = {}
        steps: dict[str, float] = {}
        for name, parameter in self._parameters.items():
            moments = self._optimizer.state.get(parameter)
            if moments:
                optimizer[f"{name}/exp_avg"] = moments["exp_avg"]
                optimizer[f"{name}/exp_avg_sq"] = moments["exp_avg_sq"]
                steps[name] = float(moments["step"])
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        return Checkpoint(
            self.version,
            {"model": dict(self.named_weights()), "optimizer": optimizer},
            {
                "optimizer_steps": steps,
                "random": {
                    name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in random.items()
                },
            },
        )

    @torch.no_grad()
    def _restore(self, checkpoint: Checkpoint) -> None:
        weights = dict(self.named_weights())
        saved = checkpoint.tensors["model"]
        differing = sorted(
            name
            for name in weights.keys() | saved.keys()
            if name not in weights or name not in saved or weights[name].shape != saved[name].shape
        )
        if differing:
            raise CheckpointMismatch(
                f"the checkpoint of step {checkpoint.step} is of another model than the campaign's "
                f"(model.path, model.build): {len(differing)} tensors differ in name or shape, such as "
                f"{differing[:3]}"
            )
        for name, weight in weights.items():
            weight.copy_(saved[name])
        moments = checkpoint.tensors["optimizer"]
        self._optimizer.state.clear()
        for name, step in checkpoint.state["optimizer_steps"].items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = {
                # Fused AdamW keeps its step counter beside the parameter.
                "step": torch.tensor(step, dtype=torch.float32, device=self.device),
                "exp_avg": moments[f"{name}/exp_avg"].to(self.device, copy=True),
                "exp_avg_sq": moments[f"{name}/exp_avg_sq"].to(self.device, copy=True),
            }
        random = {
            name: torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)
            for name, state in checkpoint.state["random"].items()
        }
        torch.set_rng_state(random["cpu"])
        if "cuda" in random and self.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], self.device)
        self.version = checkpoint.step

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

    def _mini_batches(self, sequences: list[TrainingSequence]) -> list[_MiniBatch]:
        parts = split_mini_batches([sequence.group for sequence in sequences], self.config.mini_batches)
        return [self._mini_batch([sequences[index] for index in part]) for part in parts]

    def _mini_batch(self, sequences: list[TrainingSequence]) -> _MiniBatch:
        tokens = trained_tokens(sequences)
        cuts = cut_micro_batches(
            [len(sequence.tokens) for sequence in sequences], self.config.micro_batch_tokens
        )
        micro_batches = []
        for cut in cuts:
            rows = [sequences[index] for index in cut]
            padded = pad_micro_batch(rows, [tokens.get(row.trajectory, 0) for row in rows])
            micro_batches.append(
                _MicroBatch(
                    tokens_BT=torch.from_numpy(padded.tokens).to(self.device),
                    mask_BT=torch.from_numpy(padded.loss_mask).to(self.device),
                    advantages_BT=torch.from_numpy(padded.advantages).to(self.device),
                    behaviour_logprobs_BT=torch.from_numpy(padded.behaviour_logprobs).to(self.device),
                    sequence_tokens_B=torch.from_numpy(padded.sequence_tokens).to(self.device),
                )
            )
        return _MiniBatch(micro_batches, BatchCounts(sum(tokens.values()), len(tokens)))

    @torch.no_grad()
    def _score_proximal(self, mini_batches: list[_MiniBatch]) -> None:
        for mini_batch in mini_batches:
            for micro_batch in mini_batch.micro_batches:
                micro_batch.proximal_logprobs_BT, _ = self._policy(micro_batch.tokens_BT, micro_batch.mask_BT)

    @torch.no_grad()
    def _score_reference(self, micro_batch: _MicroBatch) -> Tensor:
        if self._reference is None:
            frozen = self._load_model().requires_grad_(False)
            self._reference = TokenLogprobs(frozen, self._temperature)
        return self._reference(micro_batch.tokens_BT, micro_batch.mask_BT)[0]

    def _load_model(self) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(
            self._directory, dtype=torch.float32, use_safetensors=True
        )
        policy: PreTrainedModel = model.to(self.device).eval()  # type: ignore[arg-type]
        use_onednn(policy)
        return policy

    def _accumulate(
        self, micro_batch: _MicroBatch, counts: BatchCounts, algorithm: Algorithm, meter: Meter
    ) -> None:
        """Forward, loss and backward of one micro-batch; gradients add up in the parameters."""
        tokens_BT, mask_BT = micro_batch.tokens_BT, micro_batch.mask_BT
        reference_BT = self._score_reference(micro_batch) if algorithm.needs_reference else None
        logprobs_BT, entropy_BT = self._policy(
            tokens_BT, mask_BT, entropy_gradient=algorithm.differentiates_entropy
        )
        proximal_BT = micro_batch.proximal_logprobs_BT
        terms = algorithm.loss(
            LossInputs(
                logprobs_BT=logprobs_BT,
                entropy_BT=entropy_BT,
                mask_BT=mask_BT,
                advantages_BT=micro_batch.advantages_BT,
                behaviour_logprobs_BT=micro_batch.behaviour_logprobs_BT,
                proximal_logprobs_BT=logprobs_BT.detach() if proximal_BT is None else proximal_BT,
                reference_logprobs_BT=reference_BT,
                sequence_tokens_B=micro_batch.sequence_tokens_B,
                counts=counts,
            )
        )
        terms.loss.backward()
        meter.add(terms, tokens_BT.numel())


def learning_rate_share(step: int, *, warm_up_steps: int, final_share: float, steps: int) -> float:
    """The share of the learning rate at a train step: a linear rise, then a linear fall to `final_share`."""
    if step < warm_up_steps:
        return (step + 1) / warm_up_steps
    falling = max(1, steps - 1 - warm_up_steps)
    return 1.0 - (1.0 - final_share) * min(1.0, (step - warm_up_steps) / falling)
