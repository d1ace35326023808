"""Torch, FSDP2 and Megatron compute the same loss and the same gradients, however the model is split."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasks.train.config import TorchTrainerConfig
from tasks.train.trainers.torch import TorchTrainer
from tests.train.trainers.megatron.families import write_families
from tests.train.trainers.parity_ranks import CASES, TEMPERATURE, parity_algorithm, parity_batch
from tests.train.trainers.torchrun import torchrun

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

TOLERANCE = 1e-4
"""Of the norm of the difference over the norm, float32."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_families(directory)
    return directory


@pytest.fixture(scope="module")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("results")
    for ranks in (2, 4):
        torchrun("tests.train.trainers.parity_ranks", models, directory, ranks=ranks, timeout_s=200)
    return directory


@cache
def _reference(directory: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """One process, one pass, the torch trainer."""
    trainer = TorchTrainer(directory, TorchTrainerConfig(), temperature=TEMPERATURE)
    return trainer.loss_and_gradients(parity_batch(), parity_algorithm())


@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient_agree_with_the_torch_trainer(
    case: str, models: Path, results: Path, record_property: Callable[[str, object], None]
) -> None:
    family, _ = CASES[case]
    loss, gradients = _reference(models / family)
    found = load_file(results / f"{case}.safetensors")
    loss_error = abs(float(found.pop("loss")) - loss) / abs(loss)
    assert found.keys() == gradients.keys()
    errors = {
        name: float((found[name] - gradient).norm() / gradient.norm()) for name, gradient in gradients.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    record_property(
        "parity", f"{case}: loss {loss_error:.1e}, gradients at most {errors[worst]:.1e} ({worst})"
    )
    print(f"{case} | {loss_error:.1e} | {errors[worst]:.1e} | {worst} | {len(errors)} tensors")
    assert loss_error <= TOLERANCE
    assert errors[worst] <= TOLERANCE, worst


def test_the_batch_is_a_real_one() -> None:
    """Advantages of both signs, lengths that differ, more than one sequence a group."""
    sequences = parity_batch().sequences
    advantages = {float(sequence.advantages.max() or sequence.advantages.min()) for sequence in sequences}
    assert min(advantages) < 0 < max(advantages)
    assert len({len(sequence.tokens) for sequence in sequences}) > 4
    assert len(sequences) == 16
