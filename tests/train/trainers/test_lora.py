from pathlib import Path

import pytest
import torch

from blocks.weight_store import open_weight_store
from infra.object_store import ObjectStore
from tasks.train.algorithms.grpo import Grpo
from tasks.train.checkpoint import Checkpoints
from tasks.train.config import GrpoConfig, LoraConfig, TorchTrainerConfig
from tasks.train.trainers.base import CheckpointMismatch
from tasks.train.trainers.lora import LoraTargets, merged
from tasks.train.trainers.torch import TorchTrainer
from tasks.weights.config import PublicationConfig
from tasks.weights.publication import load, publish
from tests.train.trainers.batches import random_trajectories
from tests.train.trainers.models import tiny_llama

TARGETS = ("q_proj", "down_proj")
CHANGED = {
    f"model.layers.{layer}.{name}.weight"
    for layer in (0, 1)
    for name in ("self_attn.q_proj", "mlp.down_proj")
}


def _trainer(directory: Path, *, rank: int = 4, seed: int = 0) -> TorchTrainer:
    config = TorchTrainerConfig(lora=LoraConfig(rank=rank, alpha=8, targets=TARGETS), learning_rate=0.01)
    return TorchTrainer(directory, config, temperature=1.0, seed=seed)


def _weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_weights()}


def test_a_step_changes_the_published_payload_of_exactly_the_target_layers(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    plain = TorchTrainer(directory, TorchTrainerConfig(), temperature=1.0)
    trainer = _trainer(directory)
    algorithm = Grpo(GrpoConfig())
    store = open_weight_store(str(tmp_path / "weights"))
    publish(store, 0, trainer.named_weights(), config=PublicationConfig())
    trainer.train_step(algorithm.prepare(random_trajectories()), algorithm)
    publication = publish(store, 1, trainer.named_weights(), config=PublicationConfig())
    before, after = load(store, 0), load(store, 1)
    assert before.keys() == after.keys() == dict(plain.named_weights()).keys()
    assert all(torch.equal(before[name], weight) for name, weight in plain.named_weights())
    assert {name for name in after if not torch.equal(before[name], after[name])} == CHANGED
    assert not publication.unchanged


def test_the_published_weights_are_the_model_that_was_trained(tmp_path: Path) -> None:
    trainer = _trainer(tiny_llama(tmp_path / "model"))
    algorithm = Grpo(GrpoConfig())
    for seed in range(3):
        trainer.train_step(algorithm.prepare(random_trajectories(seed)), algorithm)
    merged_model = TorchTrainer(tmp_path / "model", TorchTrainerConfig(), temperature=1.0).model
    merged_model.load_state_dict(_weights(trainer), strict=False)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            merged_model(tokens).logits, trainer.model(tokens).logits, rtol=1e-5, atol=1e-5
        )


def test_merging_is_w_plus_scaled_b_a() -> None:
    weight, down, up = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]]), torch.tensor([[0.5]])
    assert merged(weight, down, up, 2.0).tolist() == [[4.0, 1.0]]


def test_only_adapters_have_gradients_and_moments(tmp_path: Path) -> None:
    trainer = _trainer(tiny_llama(tmp_path))
    algorithm = Grpo(GrpoConfig())
    _, gradients = trainer.loss_and_gradients(algorithm.prepare(random_trajectories()), algorithm)
    adapters = {name.removesuffix("weight") + part for name in CHANGED for part in ("lora_A", "lora_B")}
    assert gradients.keys() == adapters
    # B is 0 at first, so nothing flows to A, and everything to B.
    assert all((gradients[name].norm() > 0) == name.endswith("lora_B") for name in adapters)


def test_checkpoints_hold_the_adapters_and_resume_bit_for_bit(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    algorithm = Grpo(GrpoConfig(kl_coefficient=0.1))
    batches = [algorithm.prepare(random_trajectories(seed)) for seed in range(4)]
    checkpoints = Checkpoints(ObjectStore(str(tmp_path / "checkpoints")), keep=1)
    unbroken = _trainer(directory)
    for batch in batches[:2]:
        unbroken.train_step(batch, algorithm)
    unbroken.save(checkpoints)
    expected = [unbroken.train_step(batch, algorithm) for batch in batches[2:]]

    saved = checkpoints.load().tensors
    assert {name.rpartition(".")[2] for name in saved["model"]} == {"lora_A", "lora_B"}
    assert len(saved["optimizer"]) == 2 * len(saved["model"])
    resumed = _trainer(directory, seed=5)
    assert resumed.restore(checkpoints)
    assert [resumed.train_step(batch, algorithm) for batch in batches[2:]] == expected
    left, right = _weights(resumed), _weights(unbroken)
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_a_checkpoint_of_another_rank_is_refused_by_the_option(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    checkpoints = Checkpoints(ObjectStore(str(tmp_path / "checkpoints")), keep=1)
    _trainer(directory).save(checkpoints)
    with pytest.raises(CheckpointMismatch, match=r"train\.trainer\.lora"):
        _trainer(directory, rank=2).restore(checkpoints)


def test_the_reference_is_the_model_without_its_adapters(tmp_path: Path) -> None:
    trainer = _trainer(tiny_llama(tmp_path))
    algorithm = Grpo(GrpoConfig(kl_coefficient=0.1, kl_estimator="k3"))
    batch = algorithm.prepare(random_trajectories())
    assert trainer.train_step(batch, algorithm)["train/kl_reference"] == pytest.approx(0, abs=1e-6)
    assert trainer.train_step(batch, algorithm)["train/kl_reference"] > 1e-5


def test_a_target_that_no_layer_is_called_names_the_option_and_the_layers(tmp_path: Path) -> None:
    config = TorchTrainerConfig(lora=LoraConfig(targets=("q_proj", "query_key_value")))
    with pytest.raises(LoraTargets, match=r"train\.trainer\.lora\.targets.*query_key_value.*down_proj"):
        TorchTrainer(tiny_llama(tmp_path), config, temperature=1.0)
