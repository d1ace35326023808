import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from infra.object_store import ObjectStore
from tasks.train.algorithms import make_algorithm
from tasks.train.algorithms.base import LossInputs, LossTerms
from tasks.train.algorithms.grpo import Grpo
from tasks.train.checkpoint import Checkpoints
from tasks.train.config import Aggregation, GrpoConfig, TorchTrainerConfig
from tasks.train.micro_batches import SequenceTooLong
from tasks.train.sequences import PreparedBatch
from tasks.train.trainers.base import CheckpointMismatch
from tasks.train.trainers.schedule import learning_rate_share
from tasks.train.trainers.torch import TorchTrainer
from tasks.trajectory import Reward
from tests.train.trainers.batches import random_trajectories
from tests.train.trainers.models import tiny_llama
from tests.train.trajectories import trajectory


def _trainer(directory: Path, *, temperature: float = 1.0, **options: Any) -> TorchTrainer:
    return TorchTrainer(directory, TorchTrainerConfig(**options), temperature=temperature)


def _weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_weights()}


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_loss_and_gradient_do_not_depend_on_the_number_of_micro_batches(
    tmp_path: Path, aggregation: Aggregation
) -> None:
    constant = 20.0 if aggregation == "sequence_sum_constant" else None
    algorithm = Grpo(
        GrpoConfig(
            aggregation=aggregation,
            aggregation_constant=constant,
            kl_coefficient=0.1,
            entropy_coefficient=0.01,
            importance_cap=1.2,
        )
    )
    batch = algorithm.prepare(random_trajectories())
    directory = tiny_llama(tmp_path)
    metrics, gradients = [], []
    for tokens in (20, 60, 4096):
        trainer = _trainer(directory, micro_batch_tokens=tokens, max_gradient_norm=1e9)
        metrics.append(trainer.train_step(batch, algorithm))
        gradients.append({name: parameter.grad for name, parameter in trainer.model.named_parameters()})
    assert metrics[0]["train/padded_tokens"] < metrics[2]["train/padded_tokens"]
    scale = max(1.0, metrics[2]["train/gradient_norm"])
    for name in metrics[2].keys() - {"train/padded_tokens"}:
        assert metrics[0][name] == pytest.approx(metrics[2][name], rel=2e-6, abs=1e-6), name
        assert metrics[1][name] == pytest.approx(metrics[2][name], rel=2e-6, abs=1e-6), name
    for name, gradient in gradients[2].items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=0, atol=1e-6 * scale)
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-6 * scale)


def test_the_gradient_is_that_of_the_formula(tmp_path: Path) -> None:
    """One step against -(1/N) sum of w·A·log pi written out sequence by sequence in float64."""
    directory = tiny_llama(tmp_path)
    algorithm = Grpo(GrpoConfig(importance_cap=1.2))
    batch = algorithm.prepare(random_trajectories())
    trainer = _trainer(directory, temperature=0.8, max_gradient_norm=1e9)
    trainer.train_step(batch, algorithm)

    model = LlamaForCausalLM.from_pretrained(directory).double().eval()
    total = torch.zeros((), dtype=torch.float64)
    for sequence in batch.sequences:
        tokens = torch.from_numpy(sequence.tokens).long()
        logits = model(tokens[None]).logits[0].double() / 0.8
        logprobs = torch.log_softmax(logits[:-1], -1).gather(-1, tokens[1:, None])[:, 0]
        mask = torch.from_numpy(sequence.loss_mask)[1:]
        behaviour = torch.from_numpy(sequence.behaviour_logprobs)[1:].double()
        weights = (logprobs.detach() - behaviour).exp().clamp(max=1.2)
        advantages = torch.from_numpy(sequence.advantages)[1:].double()
        total = total - (weights * advantages * logprobs)[mask].sum()
    (total / sum(int(sequence.loss_mask.sum()) for sequence in batch.sequences)).backward()
    found = dict(trainer.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name].grad, parameter.grad.float(), rtol=1e-4, atol=1e-5)


def test_tied_weights_are_published_once_under_hugging_face_names(tmp_path: Path) -> None:
    tied = dict(_trainer(tiny_llama(tmp_path / "tied")).named_weights())
    assert "model.embed_tokens.weight" in tied
    assert "lm_head.weight" not in tied
    untied = dict(_trainer(tiny_llama(tmp_path / "untied", tied=False)).named_weights())
    assert untied.keys() - tied.keys() == {"lm_head.weight"}


def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    algorithm = Grpo(GrpoConfig(kl_coefficient=0.05))
    batches = [algorithm.prepare(random_trajectories(seed)) for seed in range(5)]
    options = {"warm_up_steps": 4, "weight_decay": 0.1, "mini_batches": 2}

    unbroken = _trainer(directory, **options)
    expected = [unbroken.train_step(batch, algorithm) for batch in batches]

    first = _trainer(directory, **options)
    for batch in batches[:3]:
        first.train_step(batch, algorithm)
    checkpoints = Checkpoints(ObjectStore(str(tmp_path / "checkpoints")), keep=2)
    first.save(checkpoints)

    torch.rand(7)
    second = _trainer(directory, **options)
    assert second.restore(checkpoints)
    assert second.version == 3
    assert _same(_weights(second), _weights(first))
    assert [second.train_step(batch, algorithm) for batch in batches[3:]] == expected[3:]
    assert _same(_weights(second), _weights(unbroken))


def test_random_state_travels_with_a_checkpoint(tmp_path: Path) -> None:
    trainer = _trainer(tiny_llama(tmp_path / "model"))
    checkpoints = Checkpoints(ObjectStore(str(tmp_path / "checkpoints")), keep=2)
    torch.rand(3)
    trainer.save(checkpoints)
    expected = torch.rand(5)
    trainer.restore(checkpoints)
    assert torch.equal(torch.rand(5), expected)


def test_without_a_checkpoint_a_trainer_starts_from_its_model(tmp_path: Path) -> None:
    trainer = _trainer(tiny_llama(tmp_path / "model"))
    before = _weights(trainer)
    assert not trainer.restore(Checkpoints(ObjectStore(str(tmp_path / "checkpoints")), keep=2))
    assert trainer.version == 0
    assert _same(_weights(trainer), before)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(ObjectStore(str(tmp_path / "checkpoints")), keep=2)
    _trainer(tiny_llama(tmp_path / "small")).save(checkpoints)
    other = _trainer(tiny_llama(tmp_path / "large", vocabulary=48))
    before = _weights(other)
    with pytest.raises(CheckpointMismatch, match=r"model\.path"):
        other.restore(checkpoints)
    assert _same(_weights(other), before)


def test_two_runs_are_equal_bit_for_bit(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path)
    algorithm = Grpo(GrpoConfig())
    results = []
    for _ in range(2):
        trainer = _trainer(directory)
        metrics = [
            trainer.train_step(algorithm.prepare(random_trajectories(seed)), algorithm) for seed in range(2)
        ]
        results.append((metrics, _weights(trainer)))
    assert results[0][0] == results[1][0]
    assert _same(results[0][1], results[1][1])


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(tmp_path: Path) -> None:
    trainer = _trainer(tiny_llama(tmp_path))
    algorithm = Grpo(GrpoConfig())
    batch = algorithm.prepare(random_trajectories())
    poisoned = replace(
        batch.sequences[0], advantages=np.where(batch.sequences[0].loss_mask, np.inf, 0).astype(np.float32)
    )
    before = _weights(trainer)
    metrics = trainer.train_step(PreparedBatch([poisoned, *batch.sequences[1:]]), algorithm)
    assert metrics["train/skipped_steps"] == 1
    assert metrics["train/gradient_norm"] == 0
    assert _same(_weights(trainer), before)
    assert trainer.version == 1
    assert trainer.train_step(batch, algorithm)["train/skipped_steps"] == 0
    assert not _same(_weights(trainer), before)


def test_a_batch_without_signal_changes_no_weight(tmp_path: Path) -> None:
    trainer = _trainer(tiny_llama(tmp_path))
    algorithm = Grpo(GrpoConfig())
    before = _weights(trainer)
    same = [replace(made, outcome=Reward(1.0)) for made in random_trajectories()]
    metrics = trainer.train_step(algorithm.prepare(same), algorithm)
    assert (metrics["train/groups"], metrics["train/zero_variance_groups"]) == (4, 4)
    assert (metrics["train/sequences"], metrics["train/skipped_steps"]) == (0, 1)
    assert metrics["train/loss"] == 0
    assert _same(_weights(trainer), before)
    assert trainer.version == 1


def test_all_zero_advantages_give_loss_zero_and_finite_metrics(tmp_path: Path) -> None:
    trainer = _trainer(tiny_llama(tmp_path))
    algorithm = Grpo(GrpoConfig(zero_variance="keep"))
    same = [replace(made, outcome=Reward(0.3)) for made in random_trajectories()]
    metrics = trainer.train_step(algorithm.prepare(same), algorithm)
    assert metrics["train/loss"] == 0
    assert metrics["train/gradient_norm"] == 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_learning_rate_warms_up_and_then_holds(tmp_path: Path) -> None:
    trainer = _trainer(tiny_llama(tmp_path), warm_up_steps=4, learning_rate=1e-3)
    rates = [
        trainer.train_step(PreparedBatch([]), Grpo(GrpoConfig()))["train/learning_rate"] for _ in range(6)
    ]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


def test_gradients_are_clipped_by_their_global_norm(tmp_path: Path) -> None:
    trainer = _trainer(tiny_llama(tmp_path), max_gradient_norm=0.01)
    algorithm = Grpo(GrpoConfig())
    metrics = trainer.train_step(algorithm.prepare(random_trajectories()), algorithm)
    assert metrics["train/gradient_norm"] > 0.01
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    assert norm == pytest.approx(0.01, rel=1e-3)


class _Recording(Grpo):
    """GRPO that keeps what it was given."""

    def __init__(self, config: GrpoConfig) -> None:
        super().__init__(config)
        self.seen: list[LossInputs] = []

    def loss(self, inputs: LossInputs) -> LossTerms:
        self.seen.append(inputs)
        return super().loss(inputs)


def test_with_one_mini_batch_the_proximal_policy_is_the_current_one(tmp_path: Path) -> None:
    algorithm = _Recording(GrpoConfig())
    metrics = _trainer(tiny_llama(tmp_path)).train_step(algorithm.prepare(random_trajectories()), algorithm)
    assert metrics["train/ratio_mean"] == 1
    assert all(torch.equal(seen.proximal_logprobs_BT, seen.logprobs_BT) for seen in algorithm.seen)
    assert not any(seen.proximal_logprobs_BT.requires_grad for seen in algorithm.seen)


def test_with_more_mini_batches_the_proximal_policy_is_that_before_the_first_step(tmp_path: Path) -> None:
    algorithm = _Recording(GrpoConfig())
    trainer = _trainer(tiny_llama(tmp_path), mini_batches=2, learning_rate=0.02)
    metrics = trainer.train_step(algorithm.prepare(random_trajectories()), algorithm)
    first, last = algorithm.seen[0], algorithm.seen[-1]
    torch.testing.assert_close(first.proximal_logprobs_BT, first.logprobs_BT.detach())
    assert (last.proximal_logprobs_BT - last.logprobs_BT).abs().max() > 1e-3
    assert metrics["train/ratio_mean"] != 1
    assert {seen.counts.sequences for seen in algorithm.seen} == {8}


def test_the_reference_is_the_model_of_the_directory_also_after_training(tmp_path: Path) -> None:
    algorithm = Grpo(GrpoConfig(kl_coefficient=0.1, kl_estimator="k3"))
    trainer = _trainer(tiny_llama(tmp_path), learning_rate=0.02)
    batch = algorithm.prepare(random_trajectories())
    assert trainer.train_step(batch, algorithm)["train/kl_reference"] == pytest.approx(0, abs=1e-6)
    assert trainer.train_step(batch, algorithm)["train/kl_reference"] > 1e-3


def test_a_sequence_above_the_micro_batch_names_the_option(tmp_path: Path) -> None:
    algorithm = Grpo(GrpoConfig())
    with pytest.raises(SequenceTooLong, match=r"train\.trainer\.micro_batch_tokens"):
        _trainer(tiny_llama(tmp_path), micro_batch_tokens=8).train_step(
            algorithm.prepare(random_trajectories()), algorithm
        )


def test_every_documented_metric_is_reported(tmp_path: Path) -> None:
    import tasks.train.trainers.base as base

    assert base.__doc__ is not None
    documented = {
        line.split("|")[1].strip() for line in base.__doc__.splitlines() if line.startswith("| train/")
    }
    algorithm = Grpo(GrpoConfig(kl_coefficient=0.1))
    assert (
        set(_trainer(tiny_llama(tmp_path)).train_step(algorithm.prepare(random_trajectories()), algorithm))
        == documented
    )


def test_grpo_learns_a_bandit(tmp_path: Path) -> None:
    """Reward 1 for an even token, sampled from the trainer's own model at temperature 1."""
    trainer = _trainer(tiny_llama(tmp_path, vocabulary=16), learning_rate=2e-3)
    algorithm = make_algorithm(GrpoConfig())
    generator = torch.Generator().manual_seed(0)
    rewards = []
    for _ in range(30):
        trajectories = []
        for group in range(4):
            with torch.no_grad():
                logprobs = torch.log_softmax(trainer.model(torch.tensor([[group]])).logits[0, -1], -1)
            for member, token in enumerate(
                torch.multinomial(logprobs.exp(), 8, replacement=True, generator=generator).tolist()
            ):
                reward = Reward(float(token % 2 == 0))
                trajectories.append(
                    trajectory(
                        [group, token],
                        [0, 1],
                        float(logprobs[token]),
                        group=group,
                        member=member,
                        outcome=reward,
                    )
                )
                rewards.append(reward.value)
        metrics = trainer.train_step(algorithm.prepare(trajectories), algorithm)
        if metrics["train/tokens"]:
            assert metrics["train/importance_mean"] == pytest.approx(1, abs=1e-4)
    first, last = np.mean(rewards[:64]), np.mean(rewards[-160:])
    assert first < 0.75
    assert last > 0.94


def test_the_learning_rate_rises_and_falls_linearly() -> None:
    shares = [learning_rate_share(step, warm_up_steps=2, final_share=0.5, steps=7) for step in range(8)]
    assert shares == pytest.approx([0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5])
    assert learning_rate_share(5, warm_up_steps=0, final_share=1.0, steps=0) == 1.0


def test_gradients_are_those_of_the_step_and_asking_for_them_changes_nothing(tmp_path: Path) -> None:
    algorithm = Grpo(GrpoConfig())
    batch = algorithm.prepare(random_trajectories())
    asked, other = (_trainer(tiny_llama(tmp_path), max_gradient_norm=1e9) for _ in range(2))
    loss, gradients = asked.loss_and_gradients(batch, algorithm)
    metrics = asked.train_step(batch, algorithm)
    assert metrics == other.train_step(batch, algorithm)
    assert loss == metrics["train/loss"]
    assert gradients.keys() == dict(asked.named_weights()).keys()
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
    assert norm == pytest.approx(metrics["train/gradient_norm"], rel=1e-5)


def test_a_batch_with_nothing_on_its_masks_has_loss_zero_and_finite_gradients(tmp_path: Path) -> None:
    """TRL #3248, unsloth-zoo #1286: an all-masked batch gave NaN."""
    algorithm = Grpo(GrpoConfig(kl_coefficient=0.1, entropy_coefficient=0.01))
    batch = algorithm.prepare(random_trajectories())
    masked = PreparedBatch(
        [replace(sequence, loss_mask=np.zeros_like(sequence.loss_mask)) for sequence in batch.sequences]
    )
    for packing in (False, True):
        trainer = _trainer(tiny_llama(tmp_path), packing=packing)
        loss, gradients = trainer.loss_and_gradients(masked, algorithm)
        assert loss == 0
        assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients.values())
        metrics = trainer.train_step(masked, algorithm)
        assert all(math.isfinite(value) for value in metrics.values() if value != -math.inf)


def test_experts_are_published_by_the_names_that_files_have(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    in_file = load_file(tmp_path / "model.safetensors")
    trainer = _trainer(tmp_path)
    published = dict(trainer.named_weights())
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in published
    assert _same(published, in_file)
    algorithm = Grpo(GrpoConfig())
    _, gradients = trainer.loss_and_gradients(algorithm.prepare(random_trajectories()), algorithm)
    assert {name: gradient.shape for name, gradient in gradients.items()} == {
        name: weight.shape for name, weight in in_file.items()
    }


def test_more_processes_than_the_process_group_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.trainer\.processes is 2, but the process group has 1"):
        _trainer(tiny_llama(tmp_path), processes=2)
