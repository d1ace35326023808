import math

import pytest
import torch

from tasks.train.corrections import importance_weights

# Ratios proximal / behaviour of 3, 1/2 and 1 on the mask, then a placeholder.
BEHAVIOUR = torch.tensor([[-2.0, -1.0, -0.7, math.nan]], dtype=torch.float64)
LOG_RATIOS = torch.tensor([[math.log(3), math.log(0.5), 0.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True, False]])


def test_weights_are_truncated_above_only_and_one_off_the_mask() -> None:
    weights = importance_weights(BEHAVIOUR + LOG_RATIOS, BEHAVIOUR, MASK, 2.0).weights_BT
    torch.testing.assert_close(weights, torch.tensor([[2.0, 0.5, 1.0, 1.0]], dtype=torch.float64))


@pytest.mark.parametrize("cap", [2.0, None])
def test_statistics_are_those_before_truncation(cap: float | None) -> None:
    importance = importance_weights(BEHAVIOUR + LOG_RATIOS, BEHAVIOUR, MASK, cap)
    assert importance.ratio_sum.item() == pytest.approx(4.5)
    assert importance.ratio_max.item() == pytest.approx(3.0)
    assert importance.truncated.item() == (1 if cap else 0)
    # k3: (3 - 1 - ln 3) + (0.5 - 1 + ln 2) + 0.
    assert importance.kl_sum.item() == pytest.approx(2 - math.log(3) - 0.5 + math.log(2))


def test_without_a_cap_every_weight_is_one() -> None:
    weights = importance_weights(BEHAVIOUR + LOG_RATIOS, BEHAVIOUR, MASK, None).weights_BT
    assert weights.tolist() == [[1.0] * 4]


def test_weights_carry_no_gradient() -> None:
    target = torch.tensor([[-1.0]], requires_grad=True)
    assert not importance_weights(
        target, torch.tensor([[-1.2]]), torch.tensor([[True]]), 2.0
    ).weights_BT.requires_grad


def test_an_impossible_mismatch_stays_finite() -> None:
    target, behaviour = torch.tensor([[0.0, -1000.0]]), torch.tensor([[-1000.0, 0.0]])
    importance = importance_weights(target, behaviour, torch.tensor([[True, True]]), 2.0)
    assert importance.ratio_max.item() == pytest.approx(math.exp(20.0), rel=1e-5)
    assert importance.weights_BT.tolist() == [[2.0, pytest.approx(math.exp(-20.0), rel=1e-5)]]


def test_an_empty_mask_has_neutral_statistics() -> None:
    importance = importance_weights(BEHAVIOUR, BEHAVIOUR, torch.zeros(1, 4, dtype=torch.bool), 2.0)
    assert [importance.ratio_sum.item(), importance.ratio_max.item(), importance.kl_sum.item()] == [0, 0, 0]
