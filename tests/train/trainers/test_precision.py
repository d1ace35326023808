from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.train.algorithms.grpo import Grpo
from tasks.train.config import GrpoConfig, TorchTrainerConfig
from tasks.train.sequences import PreparedBatch
from tasks.train.trainers.layers import decoder_layers
from tasks.train.trainers.torch import TorchTrainer
from tests.train.trainers.batches import random_trajectories
from tests.train.trainers.models import tiny_llama


def _trainer(directory: Path, **options: Any) -> TorchTrainer:
    return TorchTrainer(directory, TorchTrainerConfig(**options), temperature=1.0)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_masters_and_moments(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path)
    algorithm = Grpo(GrpoConfig())
    batch = algorithm.prepare(random_trajectories())
    trainer = _trainer(directory, compute_dtype="bfloat16")
    seen: set[torch.dtype] = set()
    layer = trainer.model.get_submodule("model.layers.0.mlp.down_proj")
    layer.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    exact_loss, exact = _trainer(directory).loss_and_gradients(batch, algorithm)
    loss, gradients = trainer.loss_and_gradients(batch, algorithm)
    trainer.train_step(batch, algorithm)
    assert seen == {torch.bfloat16}
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    moments = [state["exp_avg"].dtype for state in trainer._optimizer.state.values()]
    assert set(moments) == {torch.float32}
    assert loss == pytest.approx(exact_loss, rel=0.05)
    for name, gradient in exact.items():
        assert gradients[name].dtype == torch.float32
        assert float((gradients[name] - gradient).norm()) < 0.1 * float(gradient.norm()), name


def test_a_small_update_is_not_lost_to_bfloat16(tmp_path: Path) -> None:
    """At 1e-5 of a weight near 1, each step is far below bfloat16's spacing: only float32 masters add up."""
    trainer = _trainer(tiny_llama(tmp_path), compute_dtype="bfloat16", learning_rate=1e-5)
    algorithm = Grpo(GrpoConfig())
    batch = algorithm.prepare(random_trajectories())
    before = trainer.model.get_parameter("model.norm.weight").detach().clone()
    for _ in range(3):
        trainer.train_step(batch, algorithm)
    after = trainer.model.get_parameter("model.norm.weight").detach()
    assert torch.equal(before.bfloat16(), after.bfloat16())
    assert float((after - before).abs().max()) > 1e-5


def test_activation_checkpointing_computes_each_layer_again_and_changes_nothing(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path)
    algorithm = Grpo(GrpoConfig())
    batch = algorithm.prepare(random_trajectories())
    plain, again = (_trainer(directory, activation_checkpointing=option) for option in (False, True))
    loss, gradients, calls = _count_calls(plain, batch, algorithm)
    again_loss, again_gradients, again_calls = _count_calls(again, batch, algorithm)
    assert again_calls == 2 * calls
    assert again_loss == loss
    assert all(torch.equal(again_gradients[name], gradient) for name, gradient in gradients.items())


def _count_calls(
    trainer: TorchTrainer, batch: PreparedBatch, algorithm: Grpo
) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss, gradients, and how often attention was computed, over all layers."""
    calls: list[int] = []
    for layer in decoder_layers(trainer.model):
        layer.get_submodule("self_attn.q_proj").register_forward_hook(lambda *_: calls.append(1))
    return *trainer.loss_and_gradients(batch, algorithm), len(calls)
