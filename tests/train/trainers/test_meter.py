import math

import torch

from tasks.train.algorithms.base import LossTerms
from tasks.train.trainers.meter import Meter


def _terms(loss: float, ratio: float, maximum: float) -> LossTerms:
    return LossTerms(
        torch.tensor(loss),
        {"train/ratio_mean": torch.tensor(ratio)},
        {"train/importance_max": torch.tensor(maximum)},
    )


def test_sums_are_per_token_maxima_the_greatest_and_losses_per_mini_batch() -> None:
    meter = Meter()
    meter.add(_terms(0.5, 10.0, 1.5), 32)
    meter.add(_terms(0.25, 6.0, 3.0), 16)
    meter.add(_terms(-0.25, 4.0, 2.0), 16)
    assert meter.optimizer_step(2.0)
    assert not meter.optimizer_step(math.nan)
    metrics = meter.means(tokens=20, mini_batches=2)
    assert metrics == {
        "train/ratio_mean": 1.0,
        "train/importance_max": 3.0,
        "train/loss": 0.25,
        "train/gradient_norm": 2.0,
        "train/tokens": 20.0,
        "train/padded_tokens": 64.0,
        "train/skipped_steps": 1.0,
    }


def test_a_step_with_nothing_to_train_is_a_skipped_step() -> None:
    metrics = Meter().means(tokens=0, mini_batches=0)
    assert metrics["train/skipped_steps"] == 1
    assert metrics["train/loss"] == 0
