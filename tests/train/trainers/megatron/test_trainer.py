"""The Megatron trainer on two ranks. `scenarios` runs once; the tests read what it saw."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tasks.train.config import TorchTrainerConfig
from tasks.train.sequences import PreparedBatch
from tasks.train.trainers.torch import TorchTrainer
from tests.train.trainers.torchrun import torchrun

pytest.importorskip("megatron.core")

from tests.train.trainers.megatron.scenarios import (
    SPLITS,
    TRAINING,
    training_algorithm,
    training_batches,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(families: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scenarios")
    torchrun("tests.train.trainers.megatron.scenarios", families, directory)
    return directory


def _seen(folder: Path, scenario: str) -> Any:
    return json.loads((folder / f"{scenario}.json").read_text())


def _torch_trainer(directory: Path) -> TorchTrainer:
    return TorchTrainer(directory, TorchTrainerConfig.model_validate(TRAINING), temperature=0.8, steps=6)


def test_logprobs_and_entropy_over_a_split_vocabulary_are_those_of_float64(folder: Path) -> None:
    seen = _seen(folder, "logprobs")
    assert seen["logprobs"] < 1e-5
    assert seen["entropy"] < 1e-5
    assert seen["gradient"] < 1e-5
    assert seen["padding"] == [0.0] * 5


def test_weights_go_through_every_split_bit_for_bit(folder: Path) -> None:
    assert _seen(folder, "conversion") == {"wrong": []}


@pytest.mark.parametrize("split", SPLITS)
def test_train_steps_are_those_of_the_torch_trainer(split: str, families: Path, folder: Path) -> None:
    """Two steps of two optimiser steps: proximal and reference policies, clipping, schedule, weight decay."""
    family, _ = SPLITS[split]
    trainer = _torch_trainer(families / family)
    before = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    expected = [trainer.train_step(batch, training_algorithm()) for batch in training_batches(2)]
    for row, other in zip(_seen(folder, "training")[split], expected, strict=True):
        assert row.keys() == other.keys()
        for name in row.keys() - {"train/padded_tokens"}:
            assert row[name] == pytest.approx(other[name], rel=2e-3, abs=1e-5), name
        assert row["train/padded_tokens"] >= row["train/tokens"]
    found = load_file(folder / f"{split}.safetensors")
    weights = dict(trainer.named_weights())
    assert found.keys() == weights.keys()
    # AdamW divides by the gradient's size, so an all but zero gradient's rounding errors weigh in full.
    step = sum(float((weights[name] - before[name]).double().square().sum()) for name in weights) ** 0.5
    error = sum(float((weights[name] - found[name]).double().square().sum()) for name in weights) ** 0.5
    assert error < 1e-2 * step


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_rank_without_sequences_changes_no_gradient(family: str, families: Path, folder: Path) -> None:
    [batch] = training_batches(1)
    few = PreparedBatch([max(batch.sequences, key=lambda sequence: len(sequence.tokens))])
    loss, gradients = _torch_trainer(families / family).loss_and_gradients(few, training_algorithm())
    found = load_file(folder / f"few {family}.safetensors")
    assert float(found.pop("loss")) == pytest.approx(loss, rel=1e-4)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # An expert that no token chose has gradient 0.
        assert float((found[name] - gradient).norm()) <= 1e-4 * float(gradient.norm()), name
    assert _seen(folder, "few_sequences")[family] == 0.0


@pytest.mark.parametrize("split", ["DP2 bfloat16", "TP2 bfloat16", "PP2", "EP2"])
def test_a_resumed_run_continues_bit_for_bit(split: str, folder: Path) -> None:
    assert _seen(folder, "resume")[split] == {
        "found_nothing": True,
        "restored": True,
        "version": 3,
        "same_metrics": True,
        "same_weights": True,
    }


def test_a_checkpoint_is_read_under_another_parallelism(folder: Path) -> None:
    """Its weights are the float32 masters, whatever the compute dtype, so nothing of them is lost."""
    assert _seen(folder, "reshard") == {
        "float32": True,
        "more_than_bfloat16": True,
        "tensor_parallel": [1, True],
        "pipeline_parallel": [1, True],
        "trains_on": True,
    }


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(folder: Path) -> None:
    seen = _seen(folder, "mismatch")
    assert "model.path" in seen["error"]
    assert "model_type" in seen["error"]
    assert seen["unchanged"]


def test_bfloat16_trains_float32_masters(folder: Path) -> None:
    seen = _seen(folder, "small_steps")
    assert seen["starts_from_the_directory"]
    assert seen["dtype"] == "torch.bfloat16"
    assert seen["masters_moved"] > 0.9
    assert 0 < seen["weights_moved"] < 0.5
    assert seen["rounded"]


@pytest.mark.parametrize("split", ["tensor_parallel", "pipeline_parallel", "data_parallel"])
def test_a_gradient_that_is_not_finite_skips_the_step_on_every_rank(split: str, folder: Path) -> None:
    assert _seen(folder, "poisoned")[split] == {
        "skipped": [1, 0, 1],
        "gradient_norm": 0,
        "unchanged": True,
        "changed": True,
        "version": 3,
    }


def test_checkpointing_changes_nothing_and_bfloat16_little(folder: Path) -> None:
    seen = _seen(folder, "precision")
    assert seen["checkpointing"] == pytest.approx(seen["plain"], rel=1e-6)
    assert seen["bfloat16"] != seen["plain"]
    assert seen["bfloat16"] == pytest.approx(seen["plain"], rel=0.05)


def test_without_a_process_group_the_options_are_named(families: Path) -> None:
    from tasks.train.config import MegatronTrainerConfig
    from tasks.train.trainers.megatron import MegatronTrainer

    assert not torch.distributed.is_initialized()
    with pytest.raises(ValueError, match=r"train\.trainer\.tensor_parallel x pipeline_parallel"):
        MegatronTrainer(families / "llama", MegatronTrainerConfig(tensor_parallel=2), temperature=1.0)
