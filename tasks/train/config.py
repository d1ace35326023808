"""What a campaign says of training: the asynchronous mode, the algorithm, the trainer, checkpoints."""

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from infra.config import Config
from tasks.train.modes import MODES, ModeName

Aggregation = Literal[
    "token_mean", "token_sum", "sequence_mean_token_sum", "sequence_mean_token_mean", "sequence_sum_constant"
]
KlEstimator = Literal["k1", "k2", "k3"]


class RedundancyConfig(Config):
    """Work started beyond what a batch needs; what is left when the batch is there is cancelled."""

    groups: NonNegativeInt = 0
    members: NonNegativeInt = 0
    """Extra members of each group."""


class GrpoConfig(Config):
    """GRPO with its published variants as options."""

    kind: Literal["grpo"] = "grpo"
    normalise_by_std: bool = True
    """Divide centred rewards by the group's standard deviation (GRPO); off is Dr.GRPO's mean-only form."""
    std_floor: PositiveFloat = 1e-2
    """Lower bound of that standard deviation, so that near-ties are not blown up."""
    zero_variance: Literal["keep", "skip", "refill"] = "skip"
    """Groups whose rewards are all equal: `keep` trains them with advantage 0, `skip` leaves them out of the
    batch, `refill` also generates another group in their place."""
    refill_tries: PositiveInt = 4
    """With `refill`: groups generated per wanted group before the campaign stops with the pass rate."""
    aggregation: Aggregation = "token_mean"
    aggregation_constant: PositiveFloat | None = None
    """The constant divisor of `sequence_sum_constant` (Dr.GRPO), usually the token budget."""
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    """Upper clip; above `clip_low` it is DAPO's clip-higher."""
    dual_clip: PositiveFloat | None = None
    """Bound c > 1 on the loss of negative advantages; off when empty."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL term against the reference policy; 0 needs no reference."""
    kl_estimator: KlEstimator = "k2"
    entropy_coefficient: NonNegativeFloat = 0.0
    importance_cap: PositiveFloat | None = 2.0
    """Truncation of the weight pi_proximal / pi_behaviour of decoupled off-policy correction; empty turns the
    correction off."""

    @model_validator(mode="after")
    def _options_agree(self) -> "GrpoConfig":
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, not {self.dual_clip}")
        if (self.aggregation == "sequence_sum_constant") != (self.aggregation_constant is not None):
            raise ValueError(
                "aggregation_constant goes with aggregation: sequence_sum_constant, and only with it"
            )
        return self


class TrainerConfig(Config):
    """What every trainer has: AdamW, its schedule, and how a batch is cut."""

    threads: PositiveInt = 1
    """Torch threads of each process."""
    learning_rate: PositiveFloat = 1e-3
    warm_up_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from 0."""
    final_learning_rate_share: PositiveFloat = 1.0
    """Share of the learning rate left at the campaign's last step; after the warm-up it falls linearly."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.0
    max_gradient_norm: PositiveFloat = 1.0
    mini_batches: PositiveInt = 1
    """Optimiser steps per batch. With more than one, the proximal policy is recomputed first."""
    micro_batch_tokens: PositiveInt = 4096
    """Upper bound of tokens, padding included, in one forward and backward pass of a process."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass. Master weights, gradients' sums and moments are float32 always."""
    activation_checkpointing: bool = False
    """Keep only each layer's input in the forward pass and compute the rest again in the backward pass."""
    start_limit_s: PositiveFloat = 600.0
    """A trainer that has not loaded its model after this time has failed to start."""


class LoraConfig(Config):
    """Train low-rank adapters of the linear layers instead of the weights themselves.

    Published versions have the adapters merged in, so every engine serves them as it serves any weights.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """The adapters' product is scaled by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Last parts of the names of the linear layers that get an adapter."""


class TorchTrainerConfig(TrainerConfig):
    """The torch trainer: one process, or FSDP2 over several under torchrun."""

    kind: Literal["torch"] = "torch"
    processes: PositiveInt = 1
    """With more than one, parameters, gradients and optimiser states are sharded over them (FSDP2)."""
    packing: bool = False
    """Lay sequences end to end under the token budget instead of padding them to rectangles."""
    lora: LoraConfig | None = None


class MegatronTrainerConfig(TrainerConfig):
    """The Megatron-core trainer: tensor, pipeline, expert and data parallel.

    It has tensor_parallel x pipeline_parallel x data_parallel processes; experts are spread over
    data-parallel ranks, so expert_parallel divides data_parallel.
    """

    kind: Literal["megatron"] = "megatron"
    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    expert_parallel: PositiveInt = 1
    data_parallel: PositiveInt = 1
    sequence_parallel: bool = False
    """Shard activations between tensor-parallel layers along the sequence."""
    distributed_optimizer: bool = True
    """Shard optimiser states over the data-parallel ranks."""

    @model_validator(mode="after")
    def _parallelism_agrees(self) -> "MegatronTrainerConfig":
        if self.data_parallel % self.expert_parallel:
            raise ValueError(
                f"data_parallel ({self.data_parallel}) must be a multiple of expert_parallel "
                f"({self.expert_parallel}): change one of them"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel needs tensor_parallel above 1")
        return self

    @property
    def processes(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


AnyTrainerConfig = Annotated[TorchTrainerConfig | MegatronTrainerConfig, Field(discriminator="kind")]


class CheckpointConfig(Config):
    every: PositiveInt = 1
    """Train steps between checkpoints."""
    keep: PositiveInt = 2
    """Checkpoints kept; older ones are removed once a newer is complete."""


class TrainConfig(Config):
    steps: NonNegativeInt = 100
    """Train steps of the campaign; a resumed run that has done them ends at once."""
    groups: PositiveInt = 8
    """Groups in a batch."""
    group_size: PositiveInt = 8
    """Trajectories in a group, compared with each other."""
    batch_trajectories: PositiveInt | None = None
    """Trajectories in a batch, for those who think in these: must equal groups x group_size."""
    mode: ModeName = "tutti"
    """`sync`, `sync_plus`, `one_off`, `areal` or `tutti`: tasks/train/modes.py has the table."""
    alpha: NonNegativeInt = 1
    """Bound on staleness in policy versions: 0 in modes `sync` and `sync_plus`, 1 in `one_off`."""
    redundancy: RedundancyConfig = Field(default_factory=RedundancyConfig)
    group_deadline_s: PositiveFloat | None = None
    """A group that has run this long is closed with the members it has, or replaced where it has none. It
    counts from when the group is handed to the environments, so a wait for a place there is part of it."""
    algorithm: GrpoConfig = Field(default_factory=GrpoConfig)
    trainer: AnyTrainerConfig = Field(default_factory=TorchTrainerConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)

    @field_validator("trainer", mode="before")
    @classmethod
    def _torch_by_default(cls, value: object) -> object:
        return {"kind": "torch", **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _sizes_agree(self) -> "TrainConfig":
        if self.batch_trajectories is not None and self.batch_trajectories % self.group_size:
            raise ValueError(
                f"batch_trajectories ({self.batch_trajectories}) is not a multiple of group_size "
                f"({self.group_size}): change one of them"
            )
        if self.batch_trajectories is not None and self.batch_trajectories != self.groups * self.group_size:
            raise ValueError(
                f"batch_trajectories ({self.batch_trajectories}) is not groups x group_size "
                f"({self.groups} x {self.group_size}): change one of them"
            )
        self._check_alpha()
        if MODES[self.mode].lockstep and self.redundancy != RedundancyConfig():
            raise ValueError(
                f"redundancy cannot outrun stragglers in mode {self.mode}, where every turn waits for all of "
                "the batch: take redundancy away, or change mode to sync_plus"
            )
        if self.groups % self.trainer.mini_batches:
            raise ValueError(
                f"groups ({self.groups}) must be a multiple of trainer.mini_batches "
                f"({self.trainer.mini_batches}), so that no group is split between optimiser steps"
            )
        return self

    def _check_alpha(self) -> None:
        mode = MODES[self.mode]
        if self.alpha < mode.lowest_alpha:
            fitting = [name for name, other in MODES.items() if other.lowest_alpha <= self.alpha]
            raise ValueError(
                f"alpha must be at least {mode.lowest_alpha} in mode {mode.name}, not {self.alpha}: "
                f"change alpha, or take mode {' or '.join(fitting)}"
            )
        if mode.highest_alpha is not None and self.alpha > mode.highest_alpha:
            raise ValueError(
                f"alpha must be {mode.highest_alpha} in mode {mode.name}, not {self.alpha}: "
                "change alpha or mode"
            )
