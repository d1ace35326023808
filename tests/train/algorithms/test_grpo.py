import math
from typing import get_args

import pytest
import torch

from tasks.train.algorithms import make_algorithm
from tasks.train.algorithms.base import LossInputs
from tasks.train.algorithms.grpo import Grpo
from tasks.train.config import Aggregation, GrpoConfig
from tasks.train.losses import BatchCounts
from tasks.trajectory import InfraError, Outcome, Reward, Skip, Trajectory
from tests.train.trajectories import trajectory


def _group(group: int, outcomes: list[Outcome], first_member: int = 0) -> list[Trajectory]:
    return [
        trajectory([9, 1, 2], [0, 1, 1], -0.5, group=group, member=first_member + member, outcome=outcome)
        for member, outcome in enumerate(outcomes)
    ]


def _rewards(*values: float) -> list[Outcome]:
    return [Reward(value) for value in values]


def test_the_registry_finds_grpo() -> None:
    assert isinstance(make_algorithm(GrpoConfig()), Grpo)


def test_advantages_are_those_of_the_group() -> None:
    batch = Grpo(GrpoConfig()).prepare(_group(3, _rewards(1, 0, 0, 0)) + _group(4, _rewards(0, 2)))
    advantages = [float(sequence.advantages[-1]) for sequence in batch.sequences]
    assert advantages == pytest.approx([3**0.5, *[-(3**-0.5)] * 3, -1, 1])
    assert [sequence.group for sequence in batch.sequences] == [3] * 4 + [4] * 2
    assert [sequence.trajectory for sequence in batch.sequences] == [0, 1, 2, 3, 4, 5]


def test_mean_only_advantages() -> None:
    batch = Grpo(GrpoConfig(normalise_by_std=False)).prepare(_group(0, _rewards(1, 0, 0, 0)))
    assert [float(s.advantages[-1]) for s in batch.sequences] == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize(("policy", "kept"), [("keep", 5), ("skip", 2), ("refill", 2)])
def test_groups_without_signal_are_kept_or_left_out_and_both_are_counted(policy: str, kept: int) -> None:
    trajectories = _group(0, _rewards(0.3, 0.3, 0.3)) + _group(1, _rewards(0, 1))
    batch = Grpo(GrpoConfig.model_validate({"zero_variance": policy})).prepare(trajectories)
    assert len(batch.sequences) == kept
    assert batch.metrics["train/groups"] == 2
    assert batch.metrics["train/zero_variance_groups"] == 1
    if policy == "keep":
        assert all(sequence.advantages.tolist() == [0, 0, 0] for sequence in batch.sequences[:3])


def test_only_rewards_enter_the_statistics_and_the_rest_of_the_group_is_kept() -> None:
    outcomes = [*_rewards(1, 0), Skip("no gold answer"), InfraError("sandbox died"), Reward(math.nan)]
    batch = Grpo(GrpoConfig()).prepare(_group(0, outcomes))
    assert [float(sequence.advantages[-1]) for sequence in batch.sequences] == [1, -1]
    assert batch.metrics["train/trajectories"] == 5
    assert batch.metrics["train/left_out_skip"] == 1
    assert batch.metrics["train/left_out_infra_error"] == 1
    assert batch.metrics["train/left_out_non_finite"] == 1


def test_the_single_survivor_of_a_group_has_advantage_zero() -> None:
    outcomes: list[Outcome] = [Reward(0.7), InfraError("x"), Reward(math.inf)]
    batch = Grpo(GrpoConfig(zero_variance="keep")).prepare(_group(0, outcomes))
    assert [sequence.advantages.tolist() for sequence in batch.sequences] == [[0, 0, 0]]
    assert batch.metrics["train/zero_variance_groups"] == 1


def test_a_trajectory_that_sampled_nothing_stays_out_of_the_baseline() -> None:
    empty = trajectory([9, 1], [0, 0], group=0, member=2, outcome=Reward(100.0))
    batch = Grpo(GrpoConfig()).prepare([*_group(0, _rewards(1, 0)), empty])
    assert [float(sequence.advantages[-1]) for sequence in batch.sequences] == [1, -1]
    assert batch.metrics["train/left_out_empty"] == 1


def test_a_broken_log_probability_leaves_only_its_trajectory_out() -> None:
    broken = trajectory([9, 1], [0, 1], math.nan, group=0, member=2, outcome=Reward(1.0))
    batch = Grpo(GrpoConfig()).prepare([*_group(0, _rewards(1, 0)), broken])
    assert len(batch.sequences) == 2
    assert batch.metrics["train/left_out_non_finite"] == 1


def test_segments_of_a_trajectory_enter_its_group_once() -> None:
    segments = [
        trajectory([9, 1, 2], [0, 1, 1], group=0, member=0, outcome=Reward(1.0)),
        trajectory([9, 5, 3], [0, 0, 1], group=0, member=0, outcome=Reward(1.0)),
    ]
    batch = Grpo(GrpoConfig()).prepare(segments + _group(0, _rewards(0, 0, 0), first_member=1))
    # One reward of 1 among four, not two among five.
    assert [float(s.advantages[-1]) for s in batch.sequences] == pytest.approx(
        [3**0.5, 3**0.5, *[-(3**-0.5)] * 3]
    )
    assert [sequence.trajectory for sequence in batch.sequences] == [0, 0, 2, 3, 4]
    assert batch.metrics["train/trajectories"] == 4


def test_segments_that_disagree_on_their_reward_are_an_error() -> None:
    segments = [*_group(0, _rewards(1.0)), *_group(0, _rewards(0.0))]
    with pytest.raises(ValueError, match="different outcomes"):
        Grpo(GrpoConfig()).prepare(segments)


def _inputs(**changes: object) -> LossInputs:
    """Two tokens, advantages 2 and -1; proximal / behaviour = e^0.5 and e^-0.5; a placeholder at the end."""
    proximal = torch.tensor([[0.0, -1.0, -1.5, math.nan]], dtype=torch.float64)
    values: dict[str, object] = {
        "logprobs_BT": proximal.clone().requires_grad_(),
        "entropy_BT": torch.tensor([[0.0, 1.2, 0.8, 0.0]], dtype=torch.float64),
        "mask_BT": torch.tensor([[False, True, True, False]]),
        "advantages_BT": torch.tensor([[0.0, 2.0, -1.0, 0.0]], dtype=torch.float64),
        "behaviour_logprobs_BT": torch.tensor([[0.0, -1.5, -1.0, 0.0]], dtype=torch.float64),
        "proximal_logprobs_BT": proximal,
        "reference_logprobs_BT": None,
        "sequence_tokens_B": torch.tensor([2]),
        "counts": BatchCounts(2, 1),
    }
    return LossInputs(**{**values, **changes})  # type: ignore[arg-type]


def test_the_decoupled_loss_weights_each_token_by_its_truncated_importance() -> None:
    inputs = _inputs()
    terms = Grpo(GrpoConfig(importance_cap=1.5)).loss(inputs)
    terms.loss.backward()
    # Weights min(e^0.5, 1.5) = 1.5 and e^-0.5; loss (-1.5·2 + e^-0.5·1) / 2; gradient -w·A / 2.
    assert terms.loss.item() == pytest.approx((-3.0 + math.exp(-0.5)) / 2)
    assert inputs.logprobs_BT.grad is not None
    assert inputs.logprobs_BT.grad[0].tolist() == pytest.approx([0, -1.5, math.exp(-0.5) / 2, 0])
    assert terms.sums["train/importance_mean"].item() == pytest.approx(math.exp(0.5) + math.exp(-0.5))
    assert terms.sums["train/importance_truncated"].item() == 1
    assert terms.maxima["train/importance_max"].item() == pytest.approx(math.exp(0.5))
    # k3 at ±0.5.
    expected = (math.exp(0.5) - 1.5) + (math.exp(-0.5) - 0.5)
    assert terms.sums["train/kl_behaviour"].item() == pytest.approx(expected)
    assert terms.sums["train/ratio_mean"].item() == pytest.approx(2)
    assert terms.sums["train/entropy"].item() == pytest.approx(2.0)


def test_without_a_cap_the_importance_is_reported_and_not_applied() -> None:
    terms = Grpo(GrpoConfig(importance_cap=None)).loss(_inputs())
    assert terms.loss.item() == pytest.approx((-2.0 + 1.0) / 2)
    assert terms.sums["train/importance_mean"].item() == pytest.approx(math.exp(0.5) + math.exp(-0.5))


def test_clip_fraction_counts_tokens_whose_gradient_a_bound_removed() -> None:
    inputs = _inputs(
        logprobs_BT=torch.tensor(
            [[0.0, -1.0 + math.log(1.5), -1.5, 0.0]], dtype=torch.float64
        ).requires_grad_()
    )
    terms = Grpo(GrpoConfig(importance_cap=None)).loss(inputs)
    assert terms.sums["train/clip_fraction"].item() == 1
    assert terms.loss.item() == pytest.approx((-2.0 * 1.28 + 1.0) / 2)


def test_the_kl_term_is_weighted_from_behaviour_to_the_current_policy() -> None:
    # d = log(policy / reference) = 0.4 and -0.2; k2 = d²/2, its gradient d.
    reference = torch.tensor([[0.0, -1.4, -1.3, math.nan]], dtype=torch.float64)
    inputs = _inputs(reference_logprobs_BT=reference, advantages_BT=torch.zeros(1, 4, dtype=torch.float64))
    terms = Grpo(GrpoConfig(importance_cap=1.5, kl_coefficient=0.1)).loss(inputs)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(0.1 * (1.5 * 0.08 + math.exp(-0.5) * 0.02) / 2)
    assert inputs.logprobs_BT.grad is not None
    assert inputs.logprobs_BT.grad[0].tolist() == pytest.approx(
        [0, 0.1 * 1.5 * 0.4 / 2, -0.1 * math.exp(-0.5) * 0.2 / 2, 0]
    )
    assert terms.sums["train/kl_reference"].item() == pytest.approx(0.1)


def test_a_kl_term_without_a_reference_names_the_option() -> None:
    with pytest.raises(ValueError, match=r"train\.algorithm\.kl_coefficient"):
        Grpo(GrpoConfig(kl_coefficient=0.1)).loss(_inputs())


def test_the_entropy_bonus_lowers_the_loss() -> None:
    entropy = torch.tensor([[0.0, 1.2, 0.8, math.nan]], dtype=torch.float64, requires_grad=True)
    algorithm = Grpo(GrpoConfig(importance_cap=None, entropy_coefficient=0.01))
    terms = algorithm.loss(_inputs(entropy_BT=entropy))
    terms.loss.backward()
    assert algorithm.differentiates_entropy
    assert terms.loss.item() == pytest.approx(-0.5 - 0.01 * 1.0)
    assert entropy.grad is not None
    assert entropy.grad[0].tolist() == pytest.approx([0, -0.005, -0.005, 0])


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_an_all_masked_micro_batch_has_loss_zero_and_finite_gradients(aggregation: Aggregation) -> None:
    constant = 8.0 if aggregation == "sequence_sum_constant" else None
    config = GrpoConfig(
        aggregation=aggregation,
        aggregation_constant=constant,
        kl_coefficient=0.1,
        entropy_coefficient=0.1,
        dual_clip=3.0,
    )
    placeholders = torch.full((1, 4), -math.inf, dtype=torch.float64)
    inputs = _inputs(
        mask_BT=torch.zeros(1, 4, dtype=torch.bool),
        logprobs_BT=placeholders.clone().requires_grad_(),
        proximal_logprobs_BT=placeholders,
        behaviour_logprobs_BT=placeholders,
        reference_logprobs_BT=placeholders,
        entropy_BT=torch.full((1, 4), math.nan, dtype=torch.float64),
        sequence_tokens_B=torch.tensor([0]),
        counts=BatchCounts(0, 0),
    )
    terms = Grpo(config).loss(inputs)
    terms.loss.backward()
    assert terms.loss.item() == 0
    assert inputs.logprobs_BT.grad is not None
    assert inputs.logprobs_BT.grad.tolist() == [[0.0] * 4]
