import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from infra.object_store import ObjectStore
from tasks.train.algorithms.grpo import Grpo
from tasks.train.checkpoint import Checkpoints
from tests.train.trainers.fsdp_cases import ALGORITHM, CASES, batch, steps, trainer
from tests.train.trainers.models import tiny_llama

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left (`fsdp_ranks`), the model, and a checkpoint of one process after two steps."""
    folder = tmp_path_factory.mktemp("fsdp")
    tiny_llama(folder / "model")
    one = trainer(folder, mini_batches=2)
    steps(one, range(2))
    one.save(Checkpoints(ObjectStore(str(folder / "of-one")), keep=1))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "tests.train.trainers.fsdp_ranks", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def _assert_metrics(left: dict[str, float], right: dict[str, float]) -> None:
    """To 1e-5; padding alone depends on how the batch was cut."""
    assert left.keys() == right.keys()
    for name in left.keys() - {"train/padded_tokens"}:
        assert left[name] == pytest.approx(right[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_loss_and_the_gradients_of_one_process(
    folder: Path, results: dict[str, Any], name: str
) -> None:
    case = CASES[name]
    loss, gradients = trainer(folder, **case.options).loss_and_gradients(case.batch(), Grpo(ALGORITHM))
    assert results[name]["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    sharded = load_file(folder / f"{name}.gradients.safetensors")
    assert sharded.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        difference = float((sharded[parameter] - gradient).norm())
        assert difference <= 1e-5 * float(gradient.norm()) + 1e-9, parameter


def test_training_goes_as_in_one_process(folder: Path, results: dict[str, Any]) -> None:
    one = trainer(folder, mini_batches=2)
    for found, expected in zip(results["training"]["metrics"], steps(one, range(4)), strict=True):
        _assert_metrics(found, expected)
    sharded = load_file(folder / "after-four.safetensors")
    weights = dict(one.named_weights())
    assert sharded.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(sharded[name], weight, rtol=1e-4, atol=1e-5)


def test_a_rank_holds_its_share_of_every_parameter(results: dict[str, Any]) -> None:
    assert results["training"]["shares"] == [0.5] * len(results["training"]["shares"])


def test_two_ranks_resume_bit_for_bit(folder: Path, results: dict[str, Any]) -> None:
    training = results["training"]
    assert training["version"] == 4
    assert training["again"] == training["metrics"][2:]
    unbroken, resumed = (load_file(folder / f"{name}.safetensors") for name in ("after-four", "resumed"))
    assert all(torch.equal(resumed[name], weight) for name, weight in unbroken.items())


def test_one_process_resumes_what_two_ranks_saved(folder: Path, results: dict[str, Any]) -> None:
    checkpoints = Checkpoints(ObjectStore(str(folder / "of-two")), keep=1)
    assert checkpoints.parts() == [
        f"{kind}-{rank:05d}-of-00002" for kind in ("model", "optimizer") for rank in (0, 1)
    ]
    one = trainer(folder, mini_batches=2)
    assert one.restore(checkpoints)
    saved = load_file(folder / "after-two.safetensors")
    assert all(torch.equal(weight, saved[name]) for name, weight in one.named_weights())
    for found, expected in zip(steps(one, range(2, 4)), results["training"]["metrics"][2:], strict=True):
        _assert_metrics(found, expected)


def test_two_ranks_resume_what_one_process_saved(folder: Path, results: dict[str, Any]) -> None:
    one = trainer(folder, mini_batches=2)
    assert one.restore(Checkpoints(ObjectStore(str(folder / "of-one")), keep=1))
    for found, expected in zip(results["resharded"], steps(one, range(2, 4)), strict=True):
        _assert_metrics(found, expected)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(results: dict[str, Any]) -> None:
    assert results["skipped"] == {"skipped": 1, "same": True}


def test_bfloat16_ranks_keep_float32_masters_moments_and_gradients(
    folder: Path, results: dict[str, Any]
) -> None:
    found = results["bfloat16"]
    assert found["computed_in"] == ["torch.bfloat16"]
    assert found["gradients"] == found["masters"] == found["moments"] == ["torch.float32"]
    rounded = load_file(folder / "bfloat16.gradients.safetensors")
    _, exact = trainer(folder).loss_and_gradients(batch(0), Grpo(ALGORITHM))
    error = math.sqrt(sum(float((rounded[name] - exact[name]).square().sum()) for name in exact))
    assert error < 0.15 * math.sqrt(sum(float(gradient.square().sum()) for gradient in exact.values()))


def test_a_batch_with_nothing_on_its_masks_is_finite_on_two_ranks(results: dict[str, Any]) -> None:
    assert results["masked_step"]["train/loss"] == 0
    assert results["masked_step"]["train/gradient_norm"] == 0
    assert all(math.isfinite(value) for value in results["masked_step"].values() if value != -math.inf)
