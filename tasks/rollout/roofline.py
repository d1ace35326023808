"""How long an engine takes for a trajectory: a roofline over the hardware catalogue. Pure.

A trajectory is so many tokens prefilled and so many decoded. Peak figures are the catalogue's, and
`Efficiency` names what of them is reached.
"""

from dataclasses import dataclass

from infra.hardware import Hardware
from infra.model_size import ModelSize
from infra.resources import MEMORY_SHARE


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peak that an engine reaches. Of prefill as of training, 0.5 to 0.6 of dense peak is what
    good kernels reach; of memory bandwidth, 0.8."""

    compute: float = 0.55
    bandwidth: float = 0.8


USUAL = Efficiency()


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
    work: DomainWork,
    size: ModelSize,
    pool: RolloutPool,
    running: int,
    efficiency: Efficiency = USUAL,
) -> TrajectoryTime | None:
    """Roofline time of one trajectory on one engine; None where the model leaves no room for its KV.

    Attention costs 4 x layers x query width operations for each pair of tokens. A token's context is on
    average half of the trajectory. Prefill of P tokens is bound by compute: P (2 N + attention) operations,
    N parameters that a token passes through. A decode step of B trajectories takes the longer of its bytes
    (weights once, and the KV of B contexts) and its operations; a trajectory has 1/B of it. B is `running`,
    or fewer where no more KV fits beside the weights.
    """
    context = work.tokens / 2
    room = MEMORY_SHARE * pool.hardware.memory_bytes * pool.devices - size.weight_bytes
    batch = min(float(running), room / max(work.tokens * size.kv_bytes_per_token, 1.0))
    if batch < 1:
        return None
    compute = pool.hardware.tflops * 1e12 * efficiency.compute * pool.devices
    bandwidth = pool.hardware.bandwidth_tb_s * 1e12 * efficiency.bandwidth * pool.devices
    attention = 4 * size.layers * size.heads * size.head_dim * context
    operations = 2 * size.active_parameters + attention
    step_s = max(
        (size.weight_bytes + batch * context * size.kv_bytes_per_token) / bandwidth,
        batch * operations / compute,
    )
    return TrajectoryTime(work.prefilled * operations / compute, work.decoded * step_s / batch)
