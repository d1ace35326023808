"""What the processes around engines and trainer compute on a machine whose cores all of them share."""

from pydantic import Field, NonNegativeFloat, PositiveFloat

from infra.config import Config


class HostCosts(Config):
    """CPU seconds, measured on one machine. Of n processes that compute at once on `cores`, each gets
    min(1, cores / n) of a core: engines and the trainer too, whose seconds are then CPU seconds."""

    cores: PositiveFloat
    pace_when_full: float = Field(default=1.0, gt=0, le=1)
    """Of each process's own, when as many compute as there are cores: they share caches, memory and, where
    two virtual cores are one core's threads, its units. In between it falls evenly."""
    control_step_s: NonNegativeFloat = 0.0
    """Of the control plane, a train step: it comes between the batch and its training."""
    control_trajectory_s: NonNegativeFloat = 0.0
    """Of the control plane and its task scheduler, a trajectory: half of it before it begins."""
    proxy_turn_s: NonNegativeFloat = 0.0
    worker_turn_s: NonNegativeFloat = 0.0
    """Of the environment worker, a turn; a reset, with the trajectory's end, counts as one."""
    host_turn_s: NonNegativeFloat = 0.0
    """Of the environments' own process, a turn, beside what environments wait."""
