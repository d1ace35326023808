from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import Olmo2Config, Olmo2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tasks.train.algorithms.grpo import Grpo
from tasks.train.config import Aggregation, GrpoConfig, TorchTrainerConfig
from tasks.train.sequences import PreparedBatch, TrainingSequence
from tasks.train.trainers.packed_attention import PACKED
from tasks.train.trainers.torch import TorchTrainer
from tests.train.trainers.batches import random_trajectories
from tests.train.trainers.models import tiny_llama


def _trainer(directory: Path, **options: Any) -> TorchTrainer:
    return TorchTrainer(directory, TorchTrainerConfig(**options), temperature=0.9)


def _assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """To 1e-5 of each gradient's norm."""
    assert left.keys() == right.keys()
    for name, gradient in left.items():
        difference = float((gradient - right[name]).norm())
        assert difference <= 1e-5 * float(gradient.norm()) + 1e-9, name


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_packed_and_padded_have_the_same_loss_and_gradients(tmp_path: Path, aggregation: Aggregation) -> None:
    constant = 20.0 if aggregation == "sequence_sum_constant" else None
    algorithm = Grpo(
        GrpoConfig(
            aggregation=aggregation,
            aggregation_constant=constant,
            kl_coefficient=0.1,
            entropy_coefficient=0.01,
        )
    )
    batch = algorithm.prepare(random_trajectories())
    directory = tiny_llama(tmp_path)
    padded_loss, padded = _trainer(directory, micro_batch_tokens=64).loss_and_gradients(batch, algorithm)
    for tokens in (24, 64, 4096):
        trainer = _trainer(directory, micro_batch_tokens=tokens, packing=True)
        loss, gradients = trainer.loss_and_gradients(batch, algorithm)
        assert loss == pytest.approx(padded_loss, rel=1e-5, abs=1e-7)
        _assert_close(padded, gradients)


def test_packing_holds_for_a_model_with_sliding_and_full_attention(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    algorithm = Grpo(GrpoConfig())
    batch = algorithm.prepare(random_trajectories())
    trainer = _trainer(tmp_path, packing=True)
    assert trainer.model.config._attn_implementation == PACKED
    loss, padded = _trainer(tmp_path, micro_batch_tokens=64).loss_and_gradients(batch, algorithm)
    packed_loss, packed = trainer.loss_and_gradients(batch, algorithm)
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    _assert_close(padded, packed)


def test_packing_holds_for_a_model_whose_attention_stays_transformers_own(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = Olmo2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    Olmo2ForCausalLM(config).save_pretrained(tmp_path)
    algorithm = Grpo(GrpoConfig())
    batch = algorithm.prepare(random_trajectories())
    packed = _trainer(tmp_path, packing=True)
    assert packed.model.config._attn_implementation != PACKED
    loss, padded_gradients = _trainer(tmp_path).loss_and_gradients(batch, algorithm)
    packed_loss, packed_gradients = packed.loss_and_gradients(batch, algorithm)
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    _assert_close(padded_gradients, packed_gradients)


def test_a_sequence_never_sees_another_of_its_row(tmp_path: Path) -> None:
    """Another sequence in the row changes no bit of a sequence's log-probabilities' gradient but rounding."""
    algorithm = Grpo(GrpoConfig())

    def sequence(tokens: list[int], trajectory: int, advantage: float) -> TrainingSequence:
        mask = np.array([False] + [True] * (len(tokens) - 1))
        return TrainingSequence(
            trajectory=trajectory,
            group=trajectory,
            tokens=np.array(tokens, np.int32),
            loss_mask=mask,
            advantages=np.where(mask, advantage, 0).astype(np.float32),
            behaviour_logprobs=np.where(mask, -3.0, 0).astype(np.float32),
        )

    trainer = _trainer(tiny_llama(tmp_path), packing=True)
    watched = sequence([4, 9, 9, 1, 30, 2], 1, 1.0)
    found = []
    for other in ([7, 7, 7, 7], [1, 2, 3, 4]):
        # Without an advantage the other sequence's tokens weigh nothing in the gradient.
        batch = PreparedBatch([sequence(other, 0, 0.0), watched])
        found.append(trainer.loss_and_gradients(batch, algorithm)[1])
    _assert_close(found[0], found[1])


def test_packing_reads_no_padding(tmp_path: Path) -> None:
    algorithm = Grpo(GrpoConfig())
    batch = algorithm.prepare(random_trajectories())
    metrics = _trainer(tiny_llama(tmp_path), packing=True).train_step(batch, algorithm)
    assert metrics["train/padded_tokens"] == sum(len(sequence.tokens) for sequence in batch.sequences)
