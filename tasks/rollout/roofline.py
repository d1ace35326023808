"""How long an engine takes for a trajectory, by the performance model. Pure.

A trajectory is so many tokens prefilled and so many decoded.
"""

from dataclasses import dataclass

from infra.hardware import Hardware
from infra.model_size import ModelSize
from infra.performance.coefficients import coefficients_of
from infra.performance.iteration import BatchWork, IterationModel
from infra.performance.parallel import ModelDoesNotFit, Parallel

PREFILL_CHUNK = 8192
"""Tokens of a prefill iteration, prompts of several trajectories together."""
ALIKE = {"layer_s": 0.0, "iteration_s": 0.0, "sequence_s": 0.0, "mixture_s": 0.0}
"""Costs of launches and of the host are left out: they are alike on all pools, which are compared here."""


@dataclass(frozen=True, slots=True)
class DomainWork:
    """What the engines do for one step's trajectories of a domain. Means are a trajectory's."""

    domain: str
    trajectories: float
    tokens: float  # its length
    decoded: float  # tokens of it that were sampled
    turns: float
    prefill_scale: float = 1.0
    """Tokens prefilled for each that the environment wrote: above 1 where contexts are prefilled again."""

    @property
    def prefilled(self) -> float:
        return (self.tokens - self.decoded) * self.prefill_scale

    @property
    def prefill_share(self) -> float:
        """Of all tokens that engines compute, those of prefill."""
        work = self.prefilled + self.decoded
        return self.prefilled / work if work else 0.0


@dataclass(frozen=True, slots=True)
class RolloutPool:
    name: str
    hardware: Hardware
    engines: int
    devices: int = 1
    """Of one engine, over which the model is split."""


@dataclass(frozen=True, slots=True)
class TrajectoryTime:
    """Seconds of one engine for one trajectory, others beside it in its batches."""

    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def trajectory_time(
    work: DomainWork, size: ModelSize, pool: RolloutPool, running: int
) -> TrajectoryTime | None:
    """Time of one trajectory on one engine's devices; None where the model leaves no room for its KV.

    A token's context is on average half of the trajectory. Prefill takes its tokens' share of full chunks. A
    decode iteration is shared by the trajectories that run: `running`, or fewer where no more KV fits beside
    the weights. Raises ValueError where the heads do not divide by the pool's devices.
    """
    coefficients = coefficients_of(pool.hardware).changed(ALIKE)
    model = IterationModel(size, pool.hardware, Parallel(tensor=pool.devices), coefficients)
    try:
        room = model.kv_tokens()
    except ModelDoesNotFit:
        return None
    batch = min(running, int(room / max(work.tokens, 1.0)))
    if batch < 1:
        return None
    context = work.tokens / 2
    chunk_s = model.seconds(BatchWork(0, 0, PREFILL_CHUNK, PREFILL_CHUNK * context, 1))
    step_s = model.seconds(BatchWork(batch, round(batch * context)))
    return TrajectoryTime(work.prefilled * chunk_s / PREFILL_CHUNK, work.decoded * step_s / batch)
