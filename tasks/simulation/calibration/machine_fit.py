"""The calibration of one machine that carries a whole run, from short runs of it.

Everything is CPU seconds of a process a unit of its work; on a machine that has nothing else to do these are
also its seconds, as long as there are as many cores as processes that compute.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.hardware import CATALOGUE
from infra.models import model_of
from infra.performance.calibrated import Calibration, Fitted
from infra.performance.host_costs import HostCosts
from tasks.campaign import Campaign
from tasks.report.run_files import RunFiles, Span
from tasks.simulation.calibration.cost_fits import Placed, fit_engine_work, fit_training
from tasks.simulation.calibration.least_squares import costs
from tasks.simulation.calibration.parts_alone import Work
from tasks.simulation.calibration.profile import publication, read_archived, workload_of_run
from tasks.simulation.calibration.readings import Reading
from tasks.simulation.workload import DomainWorkload

HARDWARE = "cpu"


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A machine, for simulations of other campaigns on it."""

    calibration: Calibration
    workload: dict[str, DomainWorkload]
    weights: dict[str, Any]
    """Options of a cluster's `weights`."""
    engine_options: dict[str, Any]
    """Options of a cluster's engines that are the campaign's own."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What one step of a run did and took: medians of its steps after the warm-up."""

    campaign: Campaign
    trajectories: float
    turns: float
    cpu: dict[str, float]  # by role
    engine_work: Work
    spans: list[Span]


def calibrate(
    runs: Sequence[tuple[Path, Sequence[Reading]]],
    engine_alone: tuple[Sequence[Work], Sequence[float]],
    trainer_alone: Sequence[tuple[Sequence[int], float]],
    model: Path,
    warm_up: int,
    cores: int,
    pace_when_full: float,
) -> Calibrated:
    """From the folders of runs of mode sync_plus and the readings of their processes, and from what engine
    and trainer computed by themselves (`measure_engine`, `measure_trainer`).

    Their batches have to be of different sizes, so that what a step costs can be told from what a trajectory
    does. Steps before `warm_up` are left out.
    """
    size, place = model_of(str(model)), Placed(CATALOGUE[HARDWARE])
    found = [_run(folder, readings, warm_up) for folder, readings in runs]
    work, seconds = engine_alone
    engine = fit_engine_work(size, place, work, seconds)
    training = fit_training(size, place, trainer_alone, engine)
    rollout = found[-1].campaign.rollout.engine
    return Calibrated(
        Calibration(
            name="this-machine",
            fitted_on="CPU seconds: engine and trainer alone on "
            f"{len(work)} and {len(trainer_alone)} batches, all processes in {len(found)} runs of mode "
            f"sync_plus with {_listed(run.trajectories for run in found)} trajectories a step",
            hardware={
                HARDWARE: Fitted(
                    iteration=engine.iteration,
                    training=training.training,
                    residuals=engine.residuals | training.residuals,
                )
            },
            host=_host_costs(found, cores, pace_when_full, work, seconds),
        ),
        workload_of_run(runs[-1][0]),
        publication([span for run in found for span in run.spans], size.weight_bytes),
        {"max_running": rollout.max_running, "max_batch_tokens": rollout.max_batch_tokens},
    )


def _host_costs(
    runs: Sequence[_Run],
    cores: int,
    pace_when_full: float,
    work: Sequence[Work],
    seconds: Sequence[float],
) -> HostCosts:
    """Costs of a turn are of each run's own, in the mean. What an engine's process computes beyond its
    batches, its messages, is added to the proxy's."""
    step, trajectory = costs([[1.0, run.trajectories] for run in runs], [run.cpu["control"] for run in runs])
    unit = costs([list(each) for each in work], seconds)

    def a_turn(role: str, exchanges: bool = True) -> float:
        return statistics.fmean(
            run.cpu.get(role, 0.0) / (run.turns + exchanges * run.trajectories) for run in runs
        )

    messages = statistics.fmean(
        max(run.cpu["engine"] - sum(a * b for a, b in zip(unit, run.engine_work, strict=True)), 0.0)
        / run.turns
        for run in runs
    )
    return HostCosts(
        cores=cores,
        pace_when_full=pace_when_full,
        control_step_s=step,
        control_trajectory_s=trajectory,
        proxy_turn_s=a_turn("proxy", exchanges=False) + messages,
        worker_turn_s=a_turn("worker"),
        host_turn_s=a_turn("host"),
    )


def _run(folder: Path, readings: Sequence[Reading], warm_up: int) -> _Run:
    rows = {int(row["step"]): row for row in RunFiles(folder).read_metrics()}
    archived = read_archived(folder)
    ends: dict[int, Reading] = {}  # the first reading at which so many train steps were done
    for reading in readings:
        ends.setdefault(reading.step, reading)
    steps = [
        (ends[before], ends[before + 1])
        for before in sorted(ends)
        if before >= warm_up and before + 1 in ends and before in rows
    ]
    if not steps:
        raise ValueError(f"{folder}: a calibration needs more than {warm_up + 1} steps")

    def median_of(name: str) -> float:
        return statistics.median(end.counters[name] - begin.counters[name] for begin, end in steps)

    batch = archived.steps[max(archived.steps)]
    return _Run(
        archived.campaign,
        float(len(batch)),
        median_of("turns"),
        {
            role: statistics.median(end.cpu[role] - begin.cpu.get(role, 0.0) for begin, end in steps)
            for role in steps[-1][1].cpu
        },
        (median_of("steps"), median_of("decode_tokens"), median_of("prefill_tokens")),
        [span for span in RunFiles(folder).read_spans() if span.step >= warm_up],
    )


def _listed(numbers: Any) -> str:
    return " and ".join(f"{number:g}" for number in numbers)
