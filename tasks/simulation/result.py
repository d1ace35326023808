"""What a simulation says: its steps' metrics, and what follows for time, money and staleness. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.report.measures import batch_tokens
from tasks.report.metrics import mean_staleness, stage_seconds, staleness_histogram, wasted_share
from tasks.simulation.cluster import ClusterConfig
from tasks.simulation.usage import Usage


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Means are over the steps between warm-up and cool-down, the rows are of all."""

    rows: list[dict[str, Any]]
    """Metrics of each step, as a run's metrics.jsonl has them (`tasks.report.metrics`)."""
    warm_up_steps: int
    step_seconds: float
    """From the end of one train step to the end of the next."""
    tokens_per_s: float
    """Prompt and response tokens of the batches over step time (RollArt §7.1)."""
    stage_seconds: dict[str, float]
    """By stage: get_batch, suspend, update, resume, recompute, train_step, publish, pull, checkpoint."""
    utilisation: dict[str, float]
    """By pool: device-seconds at work over those that its devices had."""
    usd_per_step: float
    """Rent of all devices for the time of a step, whether they work or not, and what functions bill."""
    h20_hours_per_step: float
    """The same in hours of an H20, by the catalogue's ratios of cost."""
    staleness: list[int]
    """Trajectories of the batches by staleness; the index is the staleness."""
    staleness_mean: float
    wasted_share: float
    """Sampled tokens that no batch trained, of all that were sampled and either trained or given up."""
    virtual_seconds: float
    """That the whole run would take."""
    wall_seconds: float
    """That simulating it took."""
    events: int
    """Callbacks of the event loop."""
    cool_down_steps: int = 0

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The rows between warm-up and cool-down."""
        return self.rows[self.warm_up_steps : len(self.rows) - self.cool_down_steps]


def result_of(
    cluster: ClusterConfig,
    rows: Sequence[dict[str, Any]],
    usages: Sequence[Usage],
    *,
    warm_up_steps: int,
    cool_down_steps: int = 0,
    virtual_seconds: float,
    wall_seconds: float,
    events: int,
) -> SimulationResult:
    """`usages` are of the beginning and of the end of each step."""
    last = len(rows) - cool_down_steps
    steps = rows[warm_up_steps:last]
    before, after = usages[warm_up_steps], usages[last]
    elapsed = after.at - before.at
    step_seconds = elapsed / len(steps)
    histogram = _summed([staleness_histogram(row) for row in steps])
    functions = (after.function_seconds - before.function_seconds) / len(steps) / 3600
    pool = cluster.pools.get(cluster.reward.pool or "")
    usd, h20 = (pool.price, pool.entry.cost) if pool is not None else (0.0, 0.0)
    return SimulationResult(
        rows=list(rows),
        warm_up_steps=warm_up_steps,
        cool_down_steps=cool_down_steps,
        step_seconds=step_seconds,
        tokens_per_s=sum(batch_tokens(row) for row in steps) / elapsed,
        stage_seconds=_means([stage_seconds(row) for row in steps]),
        utilisation={
            name: (after.busy[name] - before.busy.get(name, 0.0)) / (elapsed * cluster.pools[name].devices)
            for name in cluster.pools
            if name in after.busy
        },
        usd_per_step=cluster.usd_per_hour * step_seconds / 3600 + usd * functions,
        h20_hours_per_step=cluster.h20_per_hour * step_seconds / 3600 + h20 * functions,
        staleness=histogram,
        staleness_mean=mean_staleness(histogram) or 0.0,
        wasted_share=wasted_share(steps) or 0.0,
        virtual_seconds=virtual_seconds,
        wall_seconds=wall_seconds,
        events=events,
    )


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}


def _summed(histograms: Sequence[Sequence[int]]) -> list[int]:
    longest = max((len(histogram) for histogram in histograms), default=0)
    return [sum(histogram[age] for histogram in histograms if age < len(histogram)) for age in range(longest)]
