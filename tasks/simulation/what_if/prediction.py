"""What a simulation says of a candidate, as plain numbers that a file can keep."""

from enum import StrEnum

from infra.config import Config
from tasks.simulation.result import SimulationResult


class Prediction(Config):
    """Means over the steps after the warm-up. USD are rent of the whole cluster, idle devices included."""

    step_seconds: float
    tokens_per_s: float
    """Prompt and response tokens of the batches over step time."""
    usd_per_hour: float
    usd_per_step: float
    h20_hours_per_step: float
    """The step's cost in hours of an H20."""
    stage_seconds: dict[str, float]
    utilisation: dict[str, float]
    """Share of its time in which a pool's devices work, by pool."""
    staleness: list[float]
    """Trajectories of the batches by their staleness; the index is the staleness."""
    staleness_mean: float
    wasted_share: float
    """Sampled tokens that no batch trained, of all whose fate was decided."""
    steps: int
    virtual_seconds: float
    wall_seconds: float
    events: int

    @classmethod
    def of(cls, result: SimulationResult, usd_per_hour: float) -> "Prediction":
        return cls(
            step_seconds=result.step_seconds,
            tokens_per_s=result.tokens_per_s,
            usd_per_hour=usd_per_hour,
            usd_per_step=result.usd_per_step,
            h20_hours_per_step=result.h20_hours_per_step,
            stage_seconds=result.stage_seconds,
            utilisation=result.utilisation,
            staleness=[float(count) for count in result.staleness],
            staleness_mean=result.staleness_mean,
            wasted_share=result.wasted_share,
            steps=len(result.steps),
            virtual_seconds=result.virtual_seconds,
            wall_seconds=result.wall_seconds,
            events=result.events,
        )

    @property
    def usd_per_million_tokens(self) -> float:
        return self.usd_per_hour / 3600 / self.tokens_per_s * 1e6 if self.tokens_per_s else float("inf")


class Objective(StrEnum):
    """What candidates are compared by: a cost, and a speed."""

    STEP_TIME = "step-time"  # USD a step against seconds a step: for candidates of the same batch
    THROUGHPUT = "throughput"  # USD a million tokens against tokens a second: batches may differ

    def costs(self, prediction: Prediction) -> tuple[float, float]:
        """Cost and slowness, both to be small."""
        if self is Objective.STEP_TIME:
            return prediction.usd_per_step, prediction.step_seconds
        return prediction.usd_per_million_tokens, -prediction.tokens_per_s
