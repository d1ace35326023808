"""GRPO (arXiv:2402.03300) and its published variants: Dr.GRPO, DAPO's clip-higher and filtering, decoupled
off-policy weights. `GrpoConfig` says which."""

import numpy as np

from tasks.train.advantages import group_advantages, has_signal
from tasks.train.algorithms.base import LossInputs, LossTerms
from tasks.train.config import GrpoConfig
from tasks.train.corrections import importance_weights
from tasks.train.kl import kl_penalty
from tasks.train.losses import aggregate, policy_gradient_loss
from tasks.train.sequences import PreparedBatch, TrainingSequence, sequence_of
from tasks.trajectory import InfraError, Reward, Skip, Trajectory, TrajectoryKey


class Grpo:
    def __init__(self, config: GrpoConfig):
        self.config = config

    @property
    def needs_reference(self) -> bool:
        return self.config.kl_coefficient > 0

    @property
    def differentiates_entropy(self) -> bool:
        return self.config.entropy_coefficient > 0

    def prepare(self, trajectories: list[Trajectory]) -> PreparedBatch:
        """Group statistics over rewarded trajectories, one advantage on all sampled tokens of each.

        Left out and counted: outcomes that are no reward, rewards or log-probabilities that are not finite,
        and trajectories in which nothing was sampled. A group keeps what remains of it. Raises ValueError
        when segments of one trajectory have different rewards.
        """
        segments: dict[TrajectoryKey, list[int]] = {}
        for index, trajectory in enumerate(trajectories):
            segments.setdefault(trajectory.key, []).append(index)
        left_out = {"skip": 0, "infra_error": 0, "non_finite": 0, "empty": 0}
        groups: dict[int, list[tuple[float, list[int]]]] = {}
        for key, indexes in segments.items():
            judged = _judge([trajectories[index] for index in indexes])
            if isinstance(judged, str):
                left_out[judged] += 1
            else:
                groups.setdefault(key.group, []).append((judged, indexes))

        sequences: list[TrainingSequence] = []
        zero_variance = 0
        for members in groups.values():
            rewards = [reward for reward, _ in members]
            if not has_signal(rewards):
                zero_variance += 1
                if self.config.zero_variance != "keep":
                    continue
            advantages = group_advantages(
                rewards, normalise_by_std=self.config.normalise_by_std, std_floor=self.config.std_floor
            )
            for (_, indexes), advantage in zip(members, advantages, strict=True):
                sequences += [
                    sequence_of(trajectories[index], indexes[0], float(advantage))
                    for index in indexes
                    if trajectories[index].sampled_tokens
                ]
        counts = {
            "train/trajectories": len(segments),
            "train/groups": len(groups),
            "train/zero_variance_groups": zero_variance,
            **{f"train/left_out_{reason}": count for reason, count in left_out.items()},
        }
        return PreparedBatch(sequences, {name: float(count) for name, count in counts.items()})

    def loss(self, inputs: LossInputs) -> LossTerms:
        """weight · surrogate + kl_coefficient · weight' · KL - entropy_coefficient · entropy, aggregated.

        weight = min(pi_proximal / pi_behaviour, importance_cap). The KL estimate holds for samples of the
        current policy, so its weight' goes from the behaviour to the current policy, under the same cap.
        Both are constants to the gradient.
        """
        config, mask_BT = self.config, inputs.mask_BT
        surrogate = policy_gradient_loss(
            inputs.logprobs_BT,
            inputs.proximal_logprobs_BT,
            inputs.advantages_BT,
            mask_BT,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        importance = importance_weights(
            inputs.proximal_logprobs_BT, inputs.behaviour_logprobs_BT, mask_BT, config.importance_cap
        )
        losses_BT = importance.weights_BT * surrogate.loss_BT
        sums = {
            "train/entropy": inputs.entropy_BT.detach().where(mask_BT, 0.0).sum(),
            "train/kl_behaviour": importance.kl_sum,
            "train/importance_mean": importance.ratio_sum,
            "train/importance_truncated": importance.truncated,
            "train/clip_fraction": (surrogate.clipped_BT & mask_BT).sum(),
            "train/ratio_mean": surrogate.ratio_BT.where(mask_BT, 0.0).sum(),
        }
        if config.kl_coefficient > 0:
            if inputs.reference_logprobs_BT is None:
                raise ValueError(
                    "train.algorithm.kl_coefficient is above 0, but the trainer gave no reference policy"
                )
            kl_BT = kl_penalty(inputs.logprobs_BT, inputs.reference_logprobs_BT, mask_BT, config.kl_estimator)
            current = importance_weights(
                inputs.logprobs_BT, inputs.behaviour_logprobs_BT, mask_BT, config.importance_cap
            )
            losses_BT = losses_BT + config.kl_coefficient * current.weights_BT * kl_BT
            sums["train/kl_reference"] = kl_BT.detach().sum()
        if config.entropy_coefficient > 0:
            losses_BT = losses_BT - config.entropy_coefficient * inputs.entropy_BT
        loss = aggregate(
            losses_BT,
            mask_BT,
            config.aggregation,
            inputs.counts,
            sequence_tokens_B=inputs.sequence_tokens_B,
            constant=config.aggregation_constant,
            dp_size=inputs.dp_size,
        )
        return LossTerms(loss, sums, {"train/importance_max": importance.ratio_max})


def _judge(segments: list[Trajectory]) -> float | str:
    """The trajectory's reward, or why it has none to train on."""
    outcome = segments[0].outcome
    if any(segment.outcome != outcome for segment in segments):
        raise ValueError(f"segments of trajectory {segments[0].key} have different outcomes")
    match outcome:
        case Skip():
            return "skip"
        case InfraError():
            return "infra_error"
        case Reward(value):
            logprobs = [segment.logprobs[segment.loss_mask] for segment in segments]
            if not np.isfinite(value) or not all(np.isfinite(array).all() for array in logprobs):
                return "non_finite"
            if not any(array.size for array in logprobs):
                return "empty"
            return value
