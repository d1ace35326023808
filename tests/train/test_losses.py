import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from tasks.train.config import Aggregation
from tasks.train.losses import BatchCounts, aggregate, entropy, policy_gradient_loss

MODES: list[Aggregation] = list(get_args(Aggregation))


def _row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def _surrogate(
    ratio: float, advantage: float, *, low: float = 0.2, high: float = 0.28, dual: float | None = None
) -> tuple[float, float, bool]:
    """Loss, gradient by the log-probability, clipped."""
    logprobs = _row(math.log(ratio) - 1.0).requires_grad_()
    result = policy_gradient_loss(
        logprobs,
        _row(-1.0),
        _row(advantage),
        torch.tensor([[True]]),
        clip_low=low,
        clip_high=high,
        dual_clip=dual,
    )
    result.loss_BT.sum().backward()
    assert logprobs.grad is not None
    return float(result.loss_BT.detach()), float(logprobs.grad), bool(result.clipped_BT)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.25, 2.0, -2.5, -2.5, False),  # above 1.2 but inside clip-higher's 1.28
        (1.5, 2.0, -2.56, 0.0, True),
        (0.5, 2.0, -1.0, -1.0, False),  # a good token made less likely is never clipped
        (0.5, -2.0, 1.6, 0.0, True),
        (0.9, -2.0, 1.8, 1.8, False),
        (5.0, -2.0, 10.0, 10.0, False),
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_clipped_surrogate(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: bool
) -> None:
    assert _surrogate(ratio, advantage) == (
        pytest.approx(loss, abs=1e-12),
        pytest.approx(gradient, abs=1e-12),
        clipped,
    )


def test_dual_clip_bounds_negative_advantages_and_nothing_else() -> None:
    assert _surrogate(5.0, -2.0, dual=3.0) == (pytest.approx(6.0), 0.0, True)
    assert _surrogate(2.0, -2.0, dual=3.0) == (pytest.approx(4.0), pytest.approx(4.0), False)
    assert _surrogate(5.0, 2.0, dual=3.0) == (pytest.approx(-2.56), 0.0, True)


def test_dual_clip_must_be_above_one() -> None:
    with pytest.raises(ValueError, match="dual_clip"):
        _surrogate(1.0, 1.0, dual=1.0)


def test_a_huge_ratio_stays_finite() -> None:
    loss, gradient, _ = _surrogate(math.exp(300.0), -1.0)
    assert loss == pytest.approx(math.exp(20.0))
    assert gradient == 0.0


def test_placeholders_behind_the_mask_reach_neither_loss_nor_gradient() -> None:
    logprobs = _row(-1.0, -math.inf, math.nan).requires_grad_()
    mask = torch.tensor([[True, False, False]])
    result = policy_gradient_loss(
        logprobs,
        _row(-1.0, -math.inf, 0.0),
        _row(2.0, math.nan, math.inf),
        mask,
        clip_low=0.2,
        clip_high=0.28,
    )
    aggregate(result.loss_BT, mask, "token_mean", BatchCounts(1, 1)).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-2.0, 0.0, 0.0]]


def test_entropy_in_nats() -> None:
    log_probabilities = torch.log(
        torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    )
    expected = torch.tensor([1.5 * math.log(2), math.log(3)], dtype=torch.float64)
    torch.testing.assert_close(entropy(log_probabilities), expected)


def test_impossible_tokens_add_nothing_to_entropy_and_its_gradient_stays_finite() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    value = entropy(torch.log_softmax(logits, -1))
    value.sum().backward()
    assert value.item() == pytest.approx(math.log(2))
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


# NeMo-RL's worked example (its loss-functions guide): 10 + 6 tokens in two micro-batches.
VALUES = torch.stack([torch.arange(1.0, 17.0), torch.arange(17.0, 33.0)]).double()
MASK = torch.tensor([[True] * 10 + [False] * 6, [True] * 6 + [False] * 10])
COUNTS = BatchCounts(tokens=16, sequences=2)
# Row sums 1 + … + 10 = 55 and 17 + … + 22 = 117.
EXPECTED: dict[Aggregation, float] = {
    "token_mean": 172 / 16,
    "token_sum": 172.0,
    "sequence_mean_token_sum": 86.0,
    "sequence_mean_token_mean": (5.5 + 19.5) / 2,
    "sequence_sum_constant": 172 / (2 * 32),
}


def _aggregate(values: Tensor, mask: Tensor, mode: Aggregation, counts: BatchCounts) -> Tensor:
    constant = 32.0 if mode == "sequence_sum_constant" else None
    return aggregate(values, mask, mode, counts, constant=constant)


@pytest.mark.parametrize("mode", MODES)
def test_aggregations_of_ten_and_six_tokens(mode: Aggregation) -> None:
    assert float(_aggregate(VALUES, MASK, mode, COUNTS)) == pytest.approx(EXPECTED[mode], rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_ten_and_six_tokens_in_two_micro_batches_give_the_loss_and_gradient_of_one(mode: Aggregation) -> None:
    whole = VALUES.clone().requires_grad_()
    _aggregate(whole, MASK, mode, COUNTS).backward()
    cut = VALUES.clone().requires_grad_()
    shares = [_aggregate(cut[i : i + 1], MASK[i : i + 1], mode, COUNTS) for i in range(2)]
    torch.stack(shares).sum().backward()
    assert torch.stack(shares).sum().item() == pytest.approx(EXPECTED[mode], rel=1e-12)
    assert whole.grad is not None
    assert cut.grad is not None
    torch.testing.assert_close(cut.grad, whole.grad)


def test_the_mean_of_micro_batch_means_is_a_different_number() -> None:
    local = [
        float(_aggregate(VALUES[i : i + 1], MASK[i : i + 1], "token_mean", BatchCounts(n, 1)))
        for i, n in enumerate((10, 6))
    ]
    assert sum(local) / 2 == pytest.approx(12.5)
    assert EXPECTED["token_mean"] == 10.75


@pytest.mark.parametrize("mode", MODES)
def test_data_parallel_ranks_that_average_gradients_get_the_global_loss(mode: Aggregation) -> None:
    constant = 32.0 if mode == "sequence_sum_constant" else None
    shares = [
        float(aggregate(VALUES[i : i + 1], MASK[i : i + 1], mode, COUNTS, constant=constant, dp_size=2))
        for i in range(2)
    ]
    assert sum(shares) / 2 == pytest.approx(EXPECTED[mode], rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_a_fully_masked_sequence_changes_nothing(mode: Aggregation) -> None:
    values = torch.cat([VALUES, torch.full((1, 16), math.nan, dtype=torch.float64)])
    mask = torch.cat([MASK, torch.zeros(1, 16, dtype=torch.bool)])
    assert float(_aggregate(values, mask, mode, COUNTS)) == pytest.approx(EXPECTED[mode], rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_an_all_masked_batch_has_loss_zero_a_graph_and_zero_gradients(mode: Aggregation) -> None:
    values = torch.full((2, 3), math.inf, dtype=torch.float64, requires_grad=True)
    loss = _aggregate(values, torch.zeros(2, 3, dtype=torch.bool), mode, BatchCounts(0, 0))
    loss.backward()
    assert loss.item() == 0
    assert values.grad is not None
    assert values.grad.tolist() == [[0.0] * 3] * 2


def test_segments_of_a_trajectory_weigh_as_the_whole_trajectory() -> None:
    # A trajectory of 10 tokens as rows of 4 and 6, and one of 6: the mean of two trajectory means.
    values = torch.stack([VALUES[0], VALUES[0].roll(-4), VALUES[1]])
    mask = torch.tensor([[True] * 4 + [False] * 12, [True] * 6 + [False] * 10, [True] * 6 + [False] * 10])
    loss = aggregate(
        values, mask, "sequence_mean_token_mean", COUNTS, sequence_tokens_B=torch.tensor([10, 10, 6])
    )
    assert float(loss) == pytest.approx(12.5, rel=1e-12)


@pytest.mark.parametrize(("mode", "constant"), [("token_mean", 3.0), ("sequence_sum_constant", None)])
def test_constant_and_mode_go_together(mode: Aggregation, constant: float | None) -> None:
    with pytest.raises(ValueError, match="aggregation_constant"):
        aggregate(VALUES, MASK, mode, COUNTS, constant=constant)
